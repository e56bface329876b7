"""Rewards that are computed by rules."""
