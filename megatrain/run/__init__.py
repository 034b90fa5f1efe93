"""A run as others see it: its folder, figures and loggers, status, signals and timeline."""
