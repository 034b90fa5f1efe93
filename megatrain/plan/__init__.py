"""Deciding before training: what a step needs, what fits where, and what that will move."""
