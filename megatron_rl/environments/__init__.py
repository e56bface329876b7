"""Dialogues: who answers the model's turns (``base.py``), by name (``by_name.py``)."""
