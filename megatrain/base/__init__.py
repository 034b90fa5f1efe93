"""The ground floor: errors, records, names and formats that every package shares. Imports ``tiered`` only."""
