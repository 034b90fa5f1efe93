"""Execution of a program: leases of blocks, sums of gradients, updates and collectives, in the order of the tape."""
