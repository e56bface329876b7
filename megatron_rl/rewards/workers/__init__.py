"""Runs rewards: in killable worker processes, or on an event loop."""
