"""Planning before training: the memory that a step needs, the placement of blocks, and the resulting traffic."""
