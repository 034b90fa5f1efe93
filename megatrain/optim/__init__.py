"""Optimizers, exact clipping and learning-rate schedules. Importing this package compiles no kernels."""
