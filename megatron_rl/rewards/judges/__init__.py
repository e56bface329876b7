"""Rewards that query a model or a server."""
