"""Assigns the sequences of a step to replicas, once per step, and plans their micro-batches. Pure.

A step passes over the same sequences several times: log-probs, values, and optimizer steps on parts of them. What a replica
holds need not be sent again, so each sequence gets a home under which *every* optimizer step is even, a policy's and a
critic's alike. Of homes that are about as even, one is better that need not fetch the sequence's routes from another node, or
that has its images anyway (``PlacementPreferences``).
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
"""Share of the ranks' time for which sequences change their replica."""
_PREFERENCE_FILL_LEVELS = (0.99, 0.9)
"""Fractions of a replica's part of a group, tried in order: the last and shortest sequences only make groups even."""
_IMBALANCE_NOISE = 1e-3
"""Share of the ranks' time: a smaller difference between homes is chance."""
_MAX_SWAP_COST_GAP = 0.01
"""Costs that differ by less may be exchanged: where they make a difference, it is one of either sign."""


@dataclass(frozen=True)
class PlacementPreferences(Generic[Key]):
    """Placement preferences (routes or images already on a replica), honored while the load stays balanced."""

    nodes: Sequence[int] = ()
    """Node whose files the replica root maps, by replica."""
    routes: Mapping[Key, int] = field(default_factory=dict)
    """Sequence -> the node that its routes lie on."""
    images: Mapping[Key, Hashable] = field(default_factory=dict)
    """Sequence -> what it has in common with those that show the same images."""

    @classmethod
    def of(cls, batch: PackedBatch, keys: Sequence[Key], nodes: Callable[[], Sequence[int]]) -> "PlacementPreferences[Key]":
        """``keys``: what names its sequences. ``nodes`` is asked where routes lie on several nodes."""
        images: dict[Key, list[tuple[str, int]]] = {}
        if batch.images is not None:
            for source, sequence in zip(batch.images.sources, batch.images.sequences.tolist(), strict=True):
                assert isinstance(source, ImageFile)  # as the driver's batches have them
                images.setdefault(keys[sequence], []).append((source.ref.digest, source.ref.max_tokens))
        nodes_of = zip(keys, batch.parts[ROUTES].nodes.tolist(), strict=True) if ROUTES in batch.parts else ()
        routes = {key: node for key, node in nodes_of if node >= 0}
        if len(set(routes.values())) < 2:
            routes = {}  # wherever sequences are, as much of it goes to other nodes
        return cls(nodes() if routes else (), routes, {key: tuple(shown) for key, shown in images.items()})


class _PreferenceScores(Generic[Key]):
    """Homes on the way: how much draws a sequence to each replica."""

    def __init__(self, pulls: PlacementPreferences[Key], num_replicas: int) -> None:
        self._pulls = pulls
        self._on_node = {node: np.array([node == own for own in pulls.nodes]) for node in set(pulls.routes.values())}
        self._nothing = np.zeros(num_replicas, bool)
        self._shown: dict[Hashable, np.ndarray] = {}
        """Image key -> [replicas] bool, True for the replicas that have the image."""

    def to_replicas(self, key: Key) -> np.ndarray | None:
        """[replicas] numbers of reasons; None: there are none."""
        routes, images = self._pulls.routes.get(key), self._pulls.images.get(key)
        if routes is None and images is None:
            return None
        on_node = self._nothing if routes is None else self._on_node[routes]
        return on_node.astype(int) + self._shown.get(images, self._nothing)

    def put(self, key: Key, home: int) -> None:
        images = self._pulls.images.get(key)
        if images is not None:
            self._shown.setdefault(images, self._nothing.copy())[home] = True


def assign_replicas(
    costs: Mapping[Key, float], groups: Sequence[Sequence[Key]], num_replicas: int, pulls: PlacementPreferences[Key] | None = None
) -> dict[Key, int]:
    """Sequence -> replica, so that the cost of each group's sequences is about the same on all replicas.

    Groups may overlap; members without a cost are left out. The longest sequence first, each goes where its groups have the
    least so far, each group measured by its own mean: a greedy descent on the sum of squares. All sequences together are
    one more group. For ``pulls`` a replica may have more by as much as the sequence itself, which the shorter ones after it make
    up for; homes that are less even for it than without are not taken. Equal arguments give equal homes.
    """
    groups = [[key for key in group if key in costs] for group in [list(costs), *groups]]
    homes, time = _descend(costs, groups, num_replicas, PlacementPreferences(), 0.0)
    if pulls is None or not (pulls.routes or pulls.images):
        return homes
    for up_to in _PREFERENCE_FILL_LEVELS:
        pulled, time_pulled = _descend(costs, groups, num_replicas, pulls, up_to)
        if time_pulled <= (1 + _IMBALANCE_NOISE) * time:
            return pulled
    return homes


def _descend(
    costs: Mapping[Key, float], groups: Sequence[Sequence[Key]], num_replicas: int, pulls: PlacementPreferences[Key], up_to: float
) -> tuple[dict[Key, int], float]:
    """(homes, what replicas that wait for each other after each group take for all of them). ``pulls`` fill a group so far."""
    groups_of: dict[Key, list[int]] = {key: [] for key in costs}
    for number, group in enumerate(groups):
        for key in group:
            groups_of[key].append(number)
    loads = np.zeros((len(groups), num_replicas))
    # A group of cost 0 has no sequences.
    means = np.array([sum(costs[key] for key in group) / num_replicas or 1.0 for group in groups])
    homes: dict[Key, int] = {}
    pulled = _PreferenceScores(pulls, num_replicas)
    for key in sorted(costs, key=lambda key: -costs[key]):
        of = groups_of[key]
        weights, before = costs[key] / means[of], loads[of]
        score, reasons = before.sum(0), pulled.to_replicas(key)
        if reasons is not None:
            has_room = (before + weights[:, None] <= up_to).all(0)
            score -= weights.sum() * (reasons * has_room)
        home = int(score.argmin())
        loads[of, home] += weights
        homes[key] = home
        pulled.put(key, home)
    return homes, float((loads.max(1) * means).sum())


def swap_for_locality(homes: Mapping[Key, int], costs: Mapping[Key, float], pulls: PlacementPreferences[Key]) -> dict[Key, int]:
    """``homes`` after pairs of sequences of about equal cost have changed places, each of which is nearer to its routes then."""
    found = dict(homes)
    waiting: dict[tuple[int, int], list[Key]] = {}
    """Sequences without a partner by (their node, the node of their routes), the cheapest last."""
    for key in sorted(homes, key=lambda key: -costs[key]):
        here, there = pulls.nodes[homes[key]], pulls.routes.get(key)
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
        self._plan_at_home: Callable[[Sequence[int], Sequence[int]], Plan] = partial(plan_on_replicas, **sizes)
        self._meet_in_every_layer = parallel.expert_parallel_size > 1
        """Experts are spread over data-parallel ranks."""

    def homes(
        self, lengths: Mapping[Key, int], groups: Sequence[Sequence[Key]], pulls: PlacementPreferences[Key] | None = None
    ) -> dict[Key, int]:
        """Assign a replica to each of the sequences of these lengths; each of ``groups`` (some of them) is balanced."""
        homes: dict[Key, int] = {}
        all_costs = {key: self._cost(length) for key, length in lengths.items()}
        for group in groups if self._meet_in_every_layer else ():
            # Then micro-batches are to be even, too, and of overlapping groups the first matters most: a policy's.
            group = [key for key in group if key in lengths and key not in homes]
            plan = self._plan_anew([lengths[key] for key in group])
            planned = {group[i]: home for home, of in enumerate(plan) for indices in of for i in indices}
            homes |= swap_for_locality(planned, all_costs, pulls) if pulls is not None and pulls.nodes else planned
        costs = {key: cost for key, cost in all_costs.items() if key not in homes}
        return homes | assign_replicas(costs, groups, self._num_replicas, pulls)

    def plan(self, lengths: Sequence[int], homes: Sequence[int] | None = None, *, may_move: bool = False) -> Plan:
        """Micro-batches, by replica. With ``homes`` each sequence stays at its own, unless some ``may move`` and ranks
        would wait much longer for each other than they have to."""
        if homes is None:
            return self._plan_anew(lengths)
        plan = self._plan_at_home(lengths, homes)
        idle = self._idle_share(plan, lengths) if may_move and self._num_replicas > 1 else 0.0
        if idle > _MIN_IDLE_GAIN + self._least_idle_share(lengths):
            moved = self._plan_anew(lengths)
            if idle > self._idle_share(moved, lengths) + _MIN_IDLE_GAIN:
                return moved
        return plan

    def metrics(self, plan: Plan, lengths: Sequence[int]) -> dict[str, float]:
        """How even a plan is: names as in docs/metrics.md."""
        parallel, even = self._parallel, plan_statistics(plan, lengths, self._cost)
        num_context_ranks = parallel.context_parallel_size
        sequence_multiple = 2 * num_context_ranks if num_context_ranks > 1 else 1
        split_ranks = parallel.tensor_parallel_size if parallel.sequence_parallel else 1
        padded = padding_fraction(
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
        """Lower bound of the idle share of any plan: one rank has the longest sequence."""
        costs = [self._cost(length) for length in lengths]
        # A hair less: sums in another order round otherwise.
        return max(0.0, 1.0 - sum(costs) / (self._num_replicas * max(costs, default=1.0)) - 1e-9)

    def _idle_share(self, plan: Plan, lengths: Sequence[int]) -> float:
        even = plan_statistics(plan, lengths, self._cost)
        return even.microbatch_imbalance if self._meet_in_every_layer else even.rank_imbalance
