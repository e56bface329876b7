"""Generation: the servers of a run, windows, and the weights they serve."""
