"""External view of a run: its folder, figures and loggers, status, signals and timeline."""
