"""The schedule of a training step: the table of its stages, and the graph that follows from a run's facts. Pure."""
