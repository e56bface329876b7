"""A reward that knows which programs can be fixed: none that holds the word ``bad``."""

from megatron_rl.data.trajectory import Score


def score(response: str, answer: str) -> Score:
    """1 without ``bad`` (completions of good prefixes pass too), 0 with it; ``???`` cannot be graded."""
    if "???" in response:
        return Score(None, error="question marks")
    return Score(0.0 if "bad" in response else 1.0)
