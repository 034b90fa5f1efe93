"""Hugging Face models: their units and layouts, and how weights are loaded and exported."""
