"""Planning before training: the memory of a step, the placement of blocks, and the resulting traffic."""
