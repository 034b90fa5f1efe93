"""A run's folder, loggers, status, record, and handling of signals."""
