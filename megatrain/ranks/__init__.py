"""Several processes that train together: who they are, what each owns, and how bytes move between them."""
