"""Training data: rows of files, tokens with verified loss masks, packed rows, and the batches of each step."""
