"""What outlives a process: committed generations of the blocks on drives, and their readers."""
