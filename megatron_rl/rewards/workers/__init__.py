"""How rewards are run: in killable worker processes, or on an event loop."""
