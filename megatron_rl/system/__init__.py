"""Signals, files and processes of the machine."""
