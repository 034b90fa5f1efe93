"""Folder, loggers, status and records of a run, and its signal handling."""
