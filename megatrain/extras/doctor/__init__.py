"""Measuring the machine: memory, processors and drives, against what the tiers get, and what to fix."""
