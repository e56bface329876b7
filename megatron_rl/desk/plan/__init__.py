"""Which layouts fit so many GPUs, what they keep in memory, and which finishes soonest."""
