"""Command-line arguments, and output on the terminal."""
