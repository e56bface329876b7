"""Processes of a run: start, signals, what they do and what they hold."""
