"""Integrations of the embedded parts into other libraries' trainers."""
