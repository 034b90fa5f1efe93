"""Measurements of the machine's memory, processors and drives, and remedies for problems."""
