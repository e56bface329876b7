"""Layouts that fit a number of GPUs, their memory, and their order by predicted seconds per response."""
