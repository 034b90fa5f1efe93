"""The machine of a run: its profile, memory and file systems, and the files of planned machines."""
