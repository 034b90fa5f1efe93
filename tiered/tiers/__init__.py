"""Tiers: places that hold bytes."""
