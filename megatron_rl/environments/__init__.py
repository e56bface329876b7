"""Environments respond to the model's turns: their interface (``base.py``), their registry (``by_name.py``), and two of them."""
