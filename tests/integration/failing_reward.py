"""A reward that fails for the prompts whose answer says so."""

from megatron_rl.rewards.registry import register


@register("failing", range=(0.0, 1.0))
def failing(response: str, answer: str) -> float:
    return float("nan") if answer == "fail" else float(len(response) % 2 == 0)
