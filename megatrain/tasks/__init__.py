"""Tasks of the config, and the forward passes of a run outside its steps."""
