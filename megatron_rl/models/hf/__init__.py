"""Hugging Face model folders: configurations, name tables, weights in and out."""
