"""Requirements of GPUs on a machine and its environment."""
