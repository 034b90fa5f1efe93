"""Integrations with the trainers of other libraries."""
