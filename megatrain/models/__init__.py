"""Hugging Face models: units, layouts, and the loading and exporting of weights."""
