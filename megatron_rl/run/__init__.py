"""Manages a run's folder: output, checkpoints, records and the summary."""
