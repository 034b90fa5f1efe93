"""Training tasks, and the forward passes that a run makes outside its training steps."""
