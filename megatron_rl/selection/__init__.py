"""Which prompts are worth training on, decided once before PPO from the scores of the policy's responses."""
