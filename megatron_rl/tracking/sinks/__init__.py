"""Trackers that receive a run's metrics: MLflow, Weights & Biases, TensorBoard."""
