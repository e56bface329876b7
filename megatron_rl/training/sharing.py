"""Which replica works on which sequence of a step, settled once, and in which micro-batches. Pure.

A step passes over the same sequences several times: log-probs, values, and optimizer steps on parts of them. What a replica
holds need not be sent again, so each sequence gets a home under which *every* optimizer step is even, a policy's and a
critic's alike.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.training.batching import (
    CostFunction,
    Plan,
    padded_share,
    plan_at_home,
    plan_microbatches,
    plan_statistics,
)

Key = TypeVar("Key", bound=Hashable)

_WORTH_MOVING = 5e-3
"""Share of the ranks' time for which sequences change their replica."""


def share_out(costs: Mapping[Key, float], groups: Sequence[Sequence[Key]], num_replicas: int) -> dict[Key, int]:
    """Sequence -> replica, so that the cost of each group's sequences is about the same on all replicas.

    Groups may overlap; members without a cost are left out. The longest sequence first, each goes where its groups have the
    least so far, each group measured by its own mean: a greedy descent on the sum of squares. All sequences together are
    one more group. Equal arguments give equal homes.
    """
    groups = [[key for key in group if key in costs] for group in [list(costs), *groups]]
    groups_of: dict[Key, list[int]] = {key: [] for key in costs}
    for number, group in enumerate(groups):
        for key in group:
            groups_of[key].append(number)
    loads = np.zeros((len(groups), num_replicas))
    # A group of cost 0 has no sequences.
    means = np.array([sum(costs[key] for key in group) / num_replicas or 1.0 for group in groups])
    homes = {}
    for key in sorted(costs, key=lambda key: -costs[key]):
        of = groups_of[key]
        home = int(loads[of].sum(0).argmin())
        loads[of, home] += costs[key] / means[of]
        homes[key] = home
    return homes


class Sharing:
    """How one engine's batches are shared out to its replicas."""

    def __init__(
        self, parallel: ParallelConfig, num_replicas: int, max_tokens_per_microbatch: int, cost: CostFunction
    ) -> None:
        # A step's plans ask for the same lengths again and again.
        self._parallel, self._num_replicas, self._cost = parallel, num_replicas, (cost := cache(cost))
        # An interleaved schedule takes micro-batches in groups of as many as there are stages.
        multiple = parallel.pipeline_parallel_size if parallel.virtual_pipeline_size > 1 else 1
        sizes: dict[str, Any] = dict(
            num_dp_ranks=num_replicas, max_tokens_per_microbatch=max_tokens_per_microbatch, cost=cost, multiple_of=multiple
        )
        self._plan_anew: Callable[[Sequence[int]], Plan] = partial(plan_microbatches, **sizes)
        self._plan_at_home: Callable[[Sequence[int], Sequence[int]], Plan] = partial(plan_at_home, **sizes)
        self._meet_in_every_layer = parallel.expert_parallel_size > 1
        """Experts are spread over data-parallel ranks."""

    def homes(self, lengths: Mapping[Key, int], groups: Sequence[Sequence[Key]]) -> dict[Key, int]:
        """Of sequences of these lengths; each of ``groups``, some of them, is to be even."""
        homes: dict[Key, int] = {}
        for group in groups if self._meet_in_every_layer else ():
            # Then micro-batches are to be even, too, and of overlapping groups the first matters most: a policy's.
            group = [key for key in group if key in lengths and key not in homes]
            plan = self._plan_anew([lengths[key] for key in group])
            homes |= {group[i]: home for home, of in enumerate(plan) for indices in of for i in indices}
        costs = {key: self._cost(length) for key, length in lengths.items() if key not in homes}
        return homes | share_out(costs, groups, self._num_replicas)

    def plan(self, lengths: Sequence[int], homes: Sequence[int] | None = None, *, may_move: bool = False) -> Plan:
        """Micro-batches, by replica. With ``homes`` each sequence stays at its own, unless some ``may move`` and ranks
        would wait much longer for each other than they have to."""
        if homes is None:
            return self._plan_anew(lengths)
        plan = self._plan_at_home(lengths, homes)
        idle = self._idle_share(plan, lengths) if may_move and self._num_replicas > 1 else 0.0
        if idle > _WORTH_MOVING + self._least_idle_share(lengths):
            moved = self._plan_anew(lengths)
            if idle > self._idle_share(moved, lengths) + _WORTH_MOVING:
                return moved
        return plan

    def metrics(self, plan: Plan, lengths: Sequence[int]) -> dict[str, float]:
        """How even a plan is: names as in docs/metrics.md."""
        parallel, even = self._parallel, plan_statistics(plan, lengths, self._cost)
        num_context_ranks = parallel.context_parallel_size
        sequence_multiple = 2 * num_context_ranks if num_context_ranks > 1 else 1
        split_ranks = parallel.tensor_parallel_size if parallel.sequence_parallel else 1
        padded = padded_share(
            plan, lengths, sequence_multiple=sequence_multiple, pack_multiple=sequence_multiple * split_ranks
        )
        return {
            "num_tokens": float(sum(lengths[index] for rank in plan for indices in rank for index in indices)),
            "num_microbatches": float(even.num_microbatches),
            "num_stand_ins": float(even.num_stand_ins),
            "rank_imbalance": even.rank_imbalance,
            "microbatch_imbalance": even.microbatch_imbalance,
            "padding_share": padded,
        }

    def _least_idle_share(self, lengths: Sequence[int]) -> float:
        """Of any plan: one rank has the longest sequence."""
        costs = [self._cost(length) for length in lengths]
        # A hair less: sums in another order round otherwise.
        return max(0.0, 1.0 - sum(costs) / (self._num_replicas * max(costs, default=1.0)) - 1e-9)

    def _idle_share(self, plan: Plan, lengths: Sequence[int]) -> float:
        even = plan_statistics(plan, lengths, self._cost)
        return even.microbatch_imbalance if self._meet_in_every_layer else even.rank_imbalance
