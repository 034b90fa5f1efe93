"""Training data: rows of files, tokens with proven loss masks, packed rows, and the batches of each step."""
