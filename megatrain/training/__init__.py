"""A training run in the order of its life: prepare, open, step, evaluate, save, finish."""
