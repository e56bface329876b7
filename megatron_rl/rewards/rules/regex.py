"""Reward ``regex``: instructions that a regular expression can check.

The ground truth of a prompt is the pattern itself. A pattern that takes too long on a response is stopped by the
worker's deadline like any other slow reward.
"""

import re
from functools import lru_cache
from typing import Literal

from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.registry import register

_compile = lru_cache(maxsize=4096)(re.compile)


@register("regex", range=(0.0, 1.0))
def score(
    response: str, answer: str, *, match: Literal["search", "fullmatch"] = "search", ignore_case: bool = False
) -> Score:
    """1.0 if the pattern ``answer`` is found in the response (or is all of it), else 0.0."""
    try:
        pattern = _compile(answer, re.IGNORECASE if ignore_case else 0)
    except re.error as error:
        return Score(None, error=f"the ground truth {answer[:80]!r} is not a regular expression: {error}")
    result = getattr(pattern, match)(response)
    return Score(float(result is not None), f"matched: {result.group()[:200]}" if result else "no match")
