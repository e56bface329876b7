"""The training step: its table of stages, and what each stage does."""
