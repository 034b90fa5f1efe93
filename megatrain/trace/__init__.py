"""The trace of one step without computing: visits, their memory and their work."""
