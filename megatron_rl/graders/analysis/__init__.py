"""Reads the tests of programs before they run: what they ask, check and could be deceived by. Runs no program; imports nothing else."""
