"""The machine of a run: its profile, memory and file systems, and files of planned machines."""
