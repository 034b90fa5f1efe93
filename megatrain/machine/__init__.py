"""Machines on which runs are executed or planned: rates, memory, file systems, and files that describe machines."""
