"""What GPUs need of a machine and of an environment."""
