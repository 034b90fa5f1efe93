"""Head of a model and the losses, computed from a few rows of logits at a time."""
