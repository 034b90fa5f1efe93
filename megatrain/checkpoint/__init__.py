"""Checkpoints: committed generations of the store, with all that a run needs to go on as if it had never stopped."""
