"""Optimizers, exact clipping and learning-rate schedules. Imports no kernel and compiles nothing."""
