"""Kernels, memory and settings of the compute device, and the work of its operators."""
