"""Durable state: committed generations of blocks on drives, and their readers."""
