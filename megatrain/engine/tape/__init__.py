"""Execution of a program in tape order: block leases, gradient sums, updates and collectives."""
