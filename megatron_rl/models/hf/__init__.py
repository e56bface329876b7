"""Hugging Face model folders: checks configurations, and loads, exports and converts weights."""
