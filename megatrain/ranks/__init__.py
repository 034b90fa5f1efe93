"""Several processes on one run: their identity, start, mutual watch, end, and shards."""
