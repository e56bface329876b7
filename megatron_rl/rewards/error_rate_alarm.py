"""Error-rate alarm: stops a run whose rewards fail too often to be trusted."""

import re
from collections import Counter
from collections.abc import Sequence

from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.registry import RewardError


class RewardAlarm(RewardError):
    """More responses of a step could not be scored than the configuration allows."""


def _error_rate(scores: Sequence[Score]) -> float:
    """Share of ``scores`` without a value; 0.0 for an empty sequence."""
    return sum(score.value is None for score in scores) / len(scores) if scores else 0.0


def check_error_rate(scores: Sequence[Score], max_error_rate: float, *, what: str = "this step") -> float:
    """Check the share of responses that could not be scored.

    Returns:
        The error rate, in [0, 1].

    Raises:
        RewardAlarm: the rate is above ``max_error_rate``; the message has the three most frequent errors.
    """
    rate = _error_rate(scores)
    if rate <= max_error_rate:
        return rate
    # Replace digits, so that the same failure on different responses counts as one kind.
    kinds = Counter(re.sub(r"\d+", "N", score.error) for score in scores if score.value is None)
    examples = {re.sub(r"\d+", "N", score.error): score.error for score in scores if score.value is None}
    frequent = "; ".join(f"{count}x {examples[kind]}" for kind, count in kinds.most_common(3))
    raise RewardAlarm(
        f"{sum(kinds.values())} of {len(scores)} responses of {what} could not be scored ({rate:.1%}, allowed "
        f"{max_error_rate:.1%}). Most frequent: {frequent}. Fix the reward, raise reward.timeout_s, "
        "or raise reward.max_error_rate if this is expected"
    )
