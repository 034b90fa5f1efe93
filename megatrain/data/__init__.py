"""Training data: rows of files, tokens with proven loss masks, packed rows, batches of one step each."""
