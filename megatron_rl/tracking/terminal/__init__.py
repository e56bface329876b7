"""What the terminal shows while a run trains."""
