"""One training step over streamed layers."""
