"""Hugging Face models: their units, layouts, weights in and out."""
