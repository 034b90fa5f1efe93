"""A machine: its profile, its memory and its file systems; machines in files."""
