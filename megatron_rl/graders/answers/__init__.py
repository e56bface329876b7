"""Answers in mathematics: where they stand in a text, what they mean, when two mean the same. Pure."""
