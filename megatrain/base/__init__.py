"""The lowest layer: errors, records, names and formats for all packages. Imports only ``tiered``."""
