"""Stores that a run's metrics go to: MLflow, Weights & Biases, TensorBoard."""
