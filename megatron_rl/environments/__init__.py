"""Dialogues: who answers the model's turns (``base.py``), by name (``environment_registry.py``)."""
