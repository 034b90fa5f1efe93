"""The embedded parts inside other libraries' trainers."""
