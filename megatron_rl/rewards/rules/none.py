"""Reward ``none``: every response gets 0, for runs that learn from a teacher alone and for prompts without an answer."""

from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.registry import register


@register("none", range=(0.0, 1.0), answer_required=False)
def score(response: str, answer: str) -> Score:
    """0.0 for every response."""
    return Score(0.0)
