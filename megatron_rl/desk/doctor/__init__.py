"""Checks a machine, trainer-server agreement and layouts, and diagnoses runs that hang or diverge."""
