"""A training run from start to end: prepare, open, step, evaluate, save, finish."""
