"""What a run does with a model: a task of the config, and the forward passes beside its steps."""
