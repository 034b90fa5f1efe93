"""Measurements of the machine's memory, processors and drives, the rates of tiers, and remedies."""
