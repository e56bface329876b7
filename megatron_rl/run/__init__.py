"""A run as a folder: output, checkpoints, records and the summary."""
