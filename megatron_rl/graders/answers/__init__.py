"""Answers in mathematics: finds them in a text, parses their meaning and compares meanings. Pure."""
