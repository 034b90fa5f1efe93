"""Several processes on one run: who they are, how they start, watch each other and end, and what each one owns."""
