"""Tiers: GPU memory, RAM and files that hold blocks."""
