"""Rewards that ask a model or a server."""
