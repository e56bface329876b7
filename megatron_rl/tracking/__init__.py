"""Records a run: metrics on disk, stores such as MLflow, the timeline of stages, and the terminal.

Nothing here raises into training, and no step waits for a store, a disk or a terminal.
"""
