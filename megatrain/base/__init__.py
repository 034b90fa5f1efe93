"""Lowest layer: errors, records, names and formats that all packages use. Imports only ``tiered``."""
