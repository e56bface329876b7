"""Seconds of a whole step from those of its parts: what waits for the longest. Pure.

Closed forms for a plan. What a run's own stage table does with given seconds is simulated elsewhere.
"""

import random
from collections.abc import Sequence


def straggler_factor(
    costs: Sequence[float], *, num_replicas: int, sequences_per_update: int, num_deals: int = 8
) -> float:
    """Seconds of a batch's updates over those of evenly shared ones: every update waits for its slowest replica.

    ``costs``: of the batch's sequences, in any unit. Updates and replicas get their sequences in random order and equal numbers,
    as trainers deal them out that balance nothing or whole batches only; the mean of ``num_deals`` orders, always the same.
    """
    slowest = 0.0
    for deal in range(num_deals):
        order = random.Random(deal).sample(range(len(costs)), len(costs))
        for start in range(0, len(order), sequences_per_update):
            update = order[start : start + sequences_per_update]
            slowest += max(sum(costs[index] for index in update[replica::num_replicas]) for replica in range(num_replicas))
    return slowest * num_replicas / sum(costs) / num_deals


def asynchronous_step_seconds(
    *, train: float, stream: float, publish: float, batch: float = 0.0, staleness: float = 1.0
) -> float:
    """Seconds of a step whose trainer takes batches that servers generate all the time.

    ``stream``: servers' seconds per batch when they never drain. ``batch``: from a batch's first token to its last, where
    its responses must begin with weights at most ``staleness`` steps old; 0 where responses go on over a publish.
    """
    return max(train, stream, batch / staleness) + publish
