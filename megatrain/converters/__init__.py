"""Converters for quirks of models, one file each. The core defines ``models/converter.py`` and imports no converter."""
