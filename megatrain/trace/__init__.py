"""Trace of one step without computation: its visits, with their memory and work."""
