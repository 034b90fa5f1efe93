"""Visits of units: bind leased weights to an unmodified module, run it, and run it again for its backward."""
