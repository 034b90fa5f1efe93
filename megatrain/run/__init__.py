"""The folder, the loggers, the status and the record of a run, and its handling of signals."""
