"""Programs: the blocks of a step, its ticks in order, and the memory that they need."""
