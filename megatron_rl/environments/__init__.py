"""Environments respond to the model's turns: interface and registry (``base.py``) and two environments."""
