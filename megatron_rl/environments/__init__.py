"""Environments respond to the model's turns: interface (``base.py``), registry (``environment_registry.py``) and two environments."""
