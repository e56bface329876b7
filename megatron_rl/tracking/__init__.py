"""Keeping track of a run: metrics on disk, MLflow, the timeline of stages, the terminal and the report.

None of it raises into training, and none of it makes a step wait for a store, a disk or a terminal.
"""
