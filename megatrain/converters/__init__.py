"""Quirks of models, one file each: the core defines ``models/converter.py`` and imports none of them."""
