"""Predicts a run's time: its own stage table on a simulated clock, with measured or assumed lengths and costs."""
