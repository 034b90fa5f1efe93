"""Host memory of exact size, and the ledger that keeps a tier within its capacity."""
