"""Assigns the sequences of a step to replicas, once per step, and plans their micro-batches. Pure.

A step passes over the same sequences several times: log-probs, values, and updates on parts of them. Rows that a
replica has cached need not be sent again, so each sequence gets one replica, such that *every* update of policy and
critic is balanced. Among assignments of about equal balance, a replica is better if it need not fetch the
sequence's routes from another node, or if it gets the sequence's images anyway (``PlacementPreferences``).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Generic, TypeVar

import numpy as np

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.data.batch import ROUTES, PackedBatch
from megatron_rl.data.images import ImageFile
from megatron_rl.training.batching import (
    CostFunction,
    Plan,
    padding_fraction,
    plan_microbatches,
    plan_on_replicas,
    plan_statistics,
)

Key = TypeVar("Key", bound=Hashable)

_MIN_IDLE_GAIN = 5e-3
"""Idle share of the ranks' time that must be gained before sequences change their replica."""
_PREFERENCE_FILL_LEVELS = (0.99, 0.9)
"""Fractions of a replica's part of a group that preferences may fill, tried in order; the last, shortest sequences only balance."""
_IMBALANCE_NOISE = 1e-3
"""Share of the ranks' time; smaller differences between assignments are chance."""
_MAX_SWAP_COST_GAP = 0.01
"""Relative difference of costs below which sequences may be swapped: such differences cancel out over many swaps."""


@dataclass(frozen=True)
class PlacementPreferences(Generic[Key]):
    """Placement preferences (routes or images already on a replica), honored while the load stays balanced."""

    nodes: Sequence[int] = ()
    """Node whose files the replica root maps, by replica."""
    routes: Mapping[Key, int] = field(default_factory=dict)
    """Sequence -> the node that has its routes."""
    images: Mapping[Key, Hashable] = field(default_factory=dict)
    """Sequence -> a key that is equal for sequences with the same images."""

    @classmethod
    def of(cls, batch: PackedBatch, keys: Sequence[Key], nodes: Callable[[], Sequence[int]]) -> "PlacementPreferences[Key]":
        """Preferences of a batch: each sequence on a node that has its routes, and sequences with the same images together.

        ``keys``: keys of the batch's sequences, in order. ``nodes``: returns the field ``nodes``; called only if
        routes are on several nodes.
        """
        images: dict[Key, list[tuple[str, int]]] = {}
        if batch.images is not None:
            for source, sequence in zip(batch.images.sources, batch.images.sequences.tolist(), strict=True):
                assert isinstance(source, ImageFile)  # as the driver's batches have them
                images.setdefault(keys[sequence], []).append((source.ref.digest, source.ref.max_tokens))
        nodes_of = zip(keys, batch.parts[ROUTES].nodes.tolist(), strict=True) if ROUTES in batch.parts else ()
        routes = {key: node for key, node in nodes_of if node >= 0}
        if len(set(routes.values())) < 2:
            routes = {}  # on one node alone: any assignment sends as much of them to other nodes
        return cls(nodes() if routes else (), routes, {key: tuple(shown) for key, shown in images.items()})


def _preferred(
    key: Key, preferences: PlacementPreferences[Key], shown: Mapping[Hashable, np.ndarray], num_replicas: int
) -> np.ndarray | None:
    """[replicas] int: number of the sequence's preferences that each replica meets; None if the sequence has no preference.

    ``shown``: images -> [replicas] bool, True if the replica has them.
    """
    routes, images = preferences.routes.get(key), preferences.images.get(key)
    if routes is None and images is None:
        return None
    nothing = np.zeros(num_replicas, bool)
    on_node = nothing if routes is None else np.array([routes == node for node in preferences.nodes])
    return on_node.astype(int) + shown.get(images, nothing)


def assign_replicas(
    costs: Mapping[Key, float],
    groups: Sequence[Sequence[Key]],
    num_replicas: int,
    preferences: PlacementPreferences[Key] | None = None,
) -> dict[Key, int]:
    """Sequence -> replica, so that the cost of each group's sequences is about the same on all replicas.

    Groups may overlap; members without a cost are ignored; all sequences together are one more group. The costliest
    sequence first, each goes to the replica where its groups have the least cost so far, relative to each group's
    mean: a greedy descent on the sum of squares. For ``preferences`` a replica may exceed the others by the
    sequence itself, because shorter sequences follow and make up for it; an assignment that is less balanced with
    ``preferences`` is dropped. Equal arguments give equal results.
    """
    groups = [[key for key in group if key in costs] for group in [list(costs), *groups]]
    homes, time = _descend(costs, groups, num_replicas, PlacementPreferences(), 0.0)
    if preferences is None or not (preferences.routes or preferences.images):
        return homes
    for up_to in _PREFERENCE_FILL_LEVELS:
        preferred, preferred_time = _descend(costs, groups, num_replicas, preferences, up_to)
        if preferred_time <= (1 + _IMBALANCE_NOISE) * time:
            return preferred
    return homes


def _descend(
    costs: Mapping[Key, float],
    groups: Sequence[Sequence[Key]],
    num_replicas: int,
    preferences: PlacementPreferences[Key],
    up_to: float,
) -> tuple[dict[Key, int], float]:
    """(assignment, time of all groups if replicas wait for each other after each group).

    ``up_to``: fraction of a replica's part of a group up to which ``preferences`` count.
    """
    groups_of: dict[Key, list[int]] = {key: [] for key in costs}
    for number, group in enumerate(groups):
        for key in group:
            groups_of[key].append(number)
    loads = np.zeros((len(groups), num_replicas))
    # A group of cost 0 has no sequences.
    means = np.array([sum(costs[key] for key in group) / num_replicas or 1.0 for group in groups])
    homes: dict[Key, int] = {}
    shown: dict[Hashable, np.ndarray] = {}
    for key in sorted(costs, key=lambda key: -costs[key]):
        of = groups_of[key]
        weights, before = costs[key] / means[of], loads[of]
        score, reasons = before.sum(0), _preferred(key, preferences, shown, num_replicas)
        if reasons is not None:
            has_room = (before + weights[:, None] <= up_to).all(0)
            score -= weights.sum() * (reasons * has_room)
        home = int(score.argmin())
        loads[of, home] += weights
        homes[key] = home
        if key in preferences.images:
            shown.setdefault(preferences.images[key], np.zeros(num_replicas, bool))[home] = True
    return homes, float((loads.max(1) * means).sum())


def swap_for_locality(homes: Mapping[Key, int], costs: Mapping[Key, float], preferences: PlacementPreferences[Key]) -> dict[Key, int]:
    """``homes`` after swaps of sequences of about equal cost that bring both sequences to the node of their routes."""
    found = dict(homes)
    waiting: dict[tuple[int, int], list[Key]] = {}
    """Sequences without a partner by (their node, the node of their routes), the cheapest last."""
    for key in sorted(homes, key=lambda key: -costs[key]):
        here, there = preferences.nodes[homes[key]], preferences.routes.get(key)
        if there is None or here == there:
            continue
        others = waiting.get((there, here))
        if others and costs[key] >= (1 - _MAX_SWAP_COST_GAP) * costs[others[-1]]:
            other = others.pop()
            found[key], found[other] = homes[other], homes[key]
        else:
            waiting.setdefault((here, there), []).append(key)
    return found


class ReplicaPlanner:
    """Plans the micro-batches of one engine's replicas."""

    def __init__(
        self, parallel: ParallelConfig, num_replicas: int, max_tokens_per_microbatch: int, cost: CostFunction
    ) -> None:
        # Cached, because a step's plans need the costs of the same lengths many times.
        self._parallel, self._num_replicas, self._cost = parallel, num_replicas, (cost := cache(cost))
        # An interleaved schedule takes micro-batches in groups of as many as there are stages.
        multiple = parallel.pipeline_parallel_size if parallel.virtual_pipeline_size > 1 else 1
        sizes: dict[str, Any] = dict(
            num_dp_ranks=num_replicas, max_tokens_per_microbatch=max_tokens_per_microbatch, cost=cost, multiple_of=multiple
        )
        self._plan_freely: Callable[[Sequence[int]], Plan] = partial(plan_microbatches, **sizes)
        self._plan_on_replicas: Callable[[Sequence[int], Sequence[int]], Plan] = partial(plan_on_replicas, **sizes)
        self._syncs_every_layer = parallel.expert_parallel_size > 1
        """True with expert parallelism: data-parallel ranks wait for each other in every layer."""

    def homes(
        self,
        lengths: Mapping[Key, int],
        groups: Sequence[Sequence[Key]],
        preferences: PlacementPreferences[Key] | None = None,
    ) -> dict[Key, int]:
        """Assign a replica to each sequence of ``lengths`` [tokens], so that the sequences of each group are balanced over the replicas.

        ``groups``: the sequences of each planned update; sequences without a length are ignored.
        """
        homes: dict[Key, int] = {}
        all_costs = {key: self._cost(length) for key, length in lengths.items()}
        for group in groups if self._syncs_every_layer else ():
            # Micro-batches must be even, too; of overlapping groups the first, a policy's, matters most.
            group = [key for key in group if key in lengths and key not in homes]
            plan = self._plan_freely([lengths[key] for key in group])
            planned = {group[i]: home for home, of in enumerate(plan) for indices in of for i in indices}
            if preferences is not None and preferences.nodes:
                planned = swap_for_locality(planned, all_costs, preferences)
            homes |= planned
        costs = {key: cost for key, cost in all_costs.items() if key not in homes}
        return homes | assign_replicas(costs, groups, self._num_replicas, preferences)

    def plan(self, lengths: Sequence[int], homes: Sequence[int] | None = None, *, may_move: bool = False) -> Plan:
        """Micro-batches, by replica. With ``homes`` each sequence stays on its assigned replica, unless sequences
        ``may_move`` and ranks would wait much longer for each other than in a free plan."""
        if homes is None:
            return self._plan_freely(lengths)
        plan = self._plan_on_replicas(lengths, homes)
        idle = self._idle_share(plan, lengths) if may_move and self._num_replicas > 1 else 0.0
        if idle > _MIN_IDLE_GAIN + self._least_idle_share(lengths):
            moved = self._plan_freely(lengths)
            if idle > self._idle_share(moved, lengths) + _MIN_IDLE_GAIN:
                return moved
        return plan

    def metrics(self, plan: Plan, lengths: Sequence[int]) -> dict[str, float]:
        """Metrics of a plan's balance, under the names in docs/metrics.md."""
        parallel, even = self._parallel, plan_statistics(plan, lengths, self._cost)
        num_context_ranks = parallel.context_parallel_size
        sequence_multiple = 2 * num_context_ranks if num_context_ranks > 1 else 1
        split_ranks = parallel.tensor_parallel_size if parallel.sequence_parallel else 1
        padded = padding_fraction(
            plan, lengths, sequence_multiple=sequence_multiple, pack_multiple=sequence_multiple * split_ranks
        )
        num_tokens = float(sum(lengths[index] for rank in plan for indices in rank for index in indices))
        return {"num_tokens": num_tokens, **even, "padding_share": padded}

    def _least_idle_share(self, lengths: Sequence[int]) -> float:
        """Lower bound of the idle share of any plan, because one rank has the longest sequence."""
        costs = [self._cost(length) for length in lengths]
        # Slightly less, because sums in another order round differently.
        return max(0.0, 1.0 - sum(costs) / (self._num_replicas * max(costs, default=1.0)) - 1e-9)

    def _idle_share(self, plan: Plan, lengths: Sequence[int]) -> float:
        even = plan_statistics(plan, lengths, self._cost)
        return even["microbatch_imbalance" if self._syncs_every_layer else "rank_imbalance"]
