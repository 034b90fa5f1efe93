"""Quirks of models, a file each: the core states ``models/converter.py`` and imports none of them."""
