"""Selects prompts to train on, once before PPO, from the scores of the policy's responses."""
