"""Converters for features and quirks of models, one file each. The core never imports a converter."""
