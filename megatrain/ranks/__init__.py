"""Runs with several processes: how they start, find and watch each other, divide the data, and end."""
