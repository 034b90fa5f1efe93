"""The lowest layer: errors, records, names and formats that all packages share. Imports only ``tiered``."""
