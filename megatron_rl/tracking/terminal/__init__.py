"""Shows a training run on the terminal."""
