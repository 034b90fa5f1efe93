"""Checkpoints: committed generations of the store, with everything a run needs to resume bit-identically."""
