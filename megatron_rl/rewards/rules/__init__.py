"""Rewards computed by rules."""
