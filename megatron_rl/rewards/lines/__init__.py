"""Rewards per line of a program, from a process reward model."""
