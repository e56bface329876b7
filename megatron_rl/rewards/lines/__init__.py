"""Rewards of single lines of a program, from a process reward model."""
