"""A reward that random text gets half of the time."""

from megatron_rl.rewards.registry import register


@register("even_length", range=(0.0, 1.0))
def even_length(response: str, answer: str) -> float:
    return float(len(response) % 2 == 0)
