"""A machine: its profile, its memory and its file systems; planned machines in files."""
