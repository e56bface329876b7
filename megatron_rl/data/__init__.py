"""Data of a step: prompts, trajectories, the slot pool and packed batches."""
