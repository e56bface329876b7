"""Seconds of a whole step from the seconds of its parts, in closed form. Pure.

These formulas rank plans. The stage table of a concrete run is simulated in ``desk/simulate``.
"""

import random
from collections.abc import Sequence


def straggler_factor(
    costs: Sequence[float], *, num_replicas: int, sequences_per_update: int, num_deals: int = 8
) -> float:
    """Seconds of a batch's updates over those of evenly balanced ones: every update waits for its slowest replica.

    ``costs``: cost of each sequence in the batch, in any unit. Updates and replicas get equal numbers of sequences
    in random order, as in trainers that balance nothing or only whole batches. Returns the mean over ``num_deals``
    fixed orders.
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
    """Seconds of a step whose trainer takes batches that servers generate continuously.

    ``stream``: servers' seconds per batch when they never drain. ``batch``: seconds from a batch's first token to
    its last if its responses must start with weights at most ``staleness`` steps old; 0 if responses continue
    across a publish.
    """
    return max(train, stream, batch / staleness) + publish
