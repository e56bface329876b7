"""Packs sequences into micro-batches and assigns these to ranks. Pure: no torch.distributed, no tensors of tokens.

"Pack first, distribute second": sequences are packed into micro-batches, then whole micro-batches are assigned to
the data-parallel ranks. Round k is the k-th micro-batch of every rank. Invariants, which the tests assert:

- every sequence is in exactly one micro-batch;
- every rank gets the same number of micro-batches, because all ranks take part in the same collectives;
- a micro-batch has at most ``max_tokens_per_microbatch`` tokens; a longer sequence gets its own micro-batch;
- a micro-batch is empty only if there are fewer sequences than micro-batches;
- micro-batches of a round cost about the same, and so do ranks: the assignment keeps the ranks' totals within the largest
  difference of a round, and later exchanges narrow that difference;
- the plan depends on the arguments alone; the order of sequences only breaks ties between equal lengths.

Costs matter twice. Data-parallel ranks wait for each other at the end of an update, so their totals should be
equal. With expert parallelism they wait in every layer, once for attention and once for the experts, so rounds
should be even in cost and in tokens. The micro-batches of a pipeline rank need not be equal, but the first and the
last should be cheap: they determine how long filling and draining takes. An interleaved schedule needs
``multiple_of`` = pipeline stages.
"""

import heapq
import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from megatron_rl.data.batch import DUMMY_TOKENS

CostFunction = Callable[[int], float]
"""Length of a sequence [tokens] -> its cost in any unit, above 0 and not falling with the length."""
Plan = list[list[list[int]]]
"""Data-parallel rank -> micro-batch -> indices of its sequences, ascending."""

_EVEN_ENOUGH = 1e-3
"""Idle share of the ranks' time that is accepted: the next batch changes more than a better plan would gain."""
_WORTH_TOPPING_UP = 1e-2
"""Idle share of a round above which sequences of later rounds may fill it."""
_NUM_RECEIVERS = 16
"""Number of least loaded ranks that may take work from the heaviest one at a time."""
_MAX_EXCHANGES_PER_RANK = 2
"""Bounds, with _NUM_RECEIVERS, the time spent on exchanges."""
_TIGHT_BUDGETS = (1.003, 1.01)
"""Smaller budgets to try, relative to the mean of the micro-batches: they balance tokens as well as costs."""


def plan_microbatches(
    lengths: Sequence[int],
    num_dp_ranks: int,
    max_tokens_per_microbatch: int,
    *,
    cost: CostFunction = float,
    multiple_of: int = 1,
) -> Plan:
    """Per rank, per micro-batch: the indices into ``lengths``, ascending. No sequences give no micro-batches.

    ``cost`` is what is balanced (``families.flops.flops_cost``), by default tokens; each rank's number of
    micro-batches is a multiple of ``multiple_of``. Raises ValueError for a length, a number of ranks, a budget or a
    multiple below 1.
    """
    numbers = {
        "num_dp_ranks": num_dp_ranks,
        "max_tokens_per_microbatch": max_tokens_per_microbatch,
        "multiple_of": multiple_of,
    }
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    empty = [index for index, length in enumerate(lengths) if length < 1]
    if empty:
        raise ValueError(f"sequence {empty[0]} has length {lengths[empty[0]]}; every sequence needs at least one token")
    if not lengths:
        return [[] for _ in range(num_dp_ranks)]
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    ordered = [lengths[index] for index in longest_first]
    batch = _CostedSequences(ordered, [cost(length) for length in ordered])
    packed = _pack(batch, num_dp_ranks * multiple_of, max_tokens_per_microbatch)
    num_packed, budgets = len(packed), _tight_budgets(batch, len(packed), max_tokens_per_microbatch)
    found = [_distribute(batch, packed, max_tokens_per_microbatch, num_dp_ranks)]
    for budget in budgets:
        tighter = _fill_cheapest(batch, range(len(ordered)), num_packed, budget)
        if tighter is not None:
            found.append(_distribute(batch, tighter, budget, num_dp_ranks))
    return [[sorted(longest_first[s] for s in m.sequences) for m in rank] for rank in _most_even(found)]


def plan_on_replicas(
    lengths: Sequence[int],
    homes: Sequence[int],
    num_dp_ranks: int,
    max_tokens_per_microbatch: int,
    *,
    cost: CostFunction = float,
    multiple_of: int = 1,
) -> Plan:
    """``plan_microbatches`` for sequences with assigned replicas (``homes``, by sequence).

    The assignment determines the balance of the ranks (``replica_assignment.assign_replicas``); the micro-batches
    of each rank are about equal.
    """
    if num_dp_ranks == 1:
        return plan_microbatches(lengths, 1, max_tokens_per_microbatch, cost=cost, multiple_of=multiple_of)
    own: list[list[int]] = [[] for _ in range(num_dp_ranks)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        own[homes[index]].append(index)
    batches = [_CostedSequences([lengths[i] for i in indices], [cost(lengths[i]) for i in indices]) for indices in own]
    packed = [_pack(batch, multiple_of, max_tokens_per_microbatch) if batch.lengths else [] for batch in batches]
    # All ranks take part in the same collectives, so all need as many micro-batches as the fullest rank.
    most = max(map(len, packed))
    plan = []
    for batch, indices, microbatches in zip(batches, own, packed, strict=True):
        if len(microbatches) < most:
            spread = _fill_cheapest(batch, range(len(indices)), most, max_tokens_per_microbatch)
            microbatches = spread or [*microbatches, *(_Microbatch() for _ in range(most - len(microbatches)))]
        ordered = _cheap_ends(sorted(microbatches, key=lambda microbatch: -microbatch.cost))
        plan.append([sorted(indices[s] for s in microbatch.sequences) for microbatch in ordered])
    return plan


def plan_statistics(plan: Plan, lengths: Sequence[int], cost: CostFunction = float) -> dict[str, float]:
    """Balance of ``plan``, of all or some of ``lengths``, under ``cost``; shares are in [0, 1), and 0 is best.

    num_microbatches      micro-batches per rank
    num_stand_ins         micro-batches without sequences, over all ranks
    rank_imbalance        idle share of the ranks' time if ranks wait for each other once, at the end: 1 - mean / max of the totals
    microbatch_imbalance  idle share if ranks wait for each other in every round (expert parallelism)
    padding_share         share of padding if all micro-batches of a round were padded to the longest; here they are not
    """
    costs = {index: cost(lengths[index]) for rank in plan for microbatch in rank for index in microbatch}
    cost_of = [[sum(costs[index] for index in microbatch) for microbatch in rank] for rank in plan]
    tokens_of = [[sum(lengths[index] for index in microbatch) for microbatch in rank] for rank in plan]
    return {
        "num_microbatches": float(len(plan[0])),
        "num_stand_ins": float(sum(not microbatch for rank in plan for microbatch in rank)),
        "rank_imbalance": _idle_share([[sum(rank) for rank in cost_of]]),
        "microbatch_imbalance": _idle_share(list(zip(*cost_of, strict=True))),
        "padding_share": _idle_share(list(zip(*tokens_of, strict=True))),
    }


def padding_fraction(plan: Plan, lengths: Sequence[int], *, sequence_multiple: int = 1, pack_multiple: int = 1) -> float:
    """Share of padding in the rows that the ranks compute, in [0, 1).

    A layout pads each sequence to ``sequence_multiple`` tokens (2 x context-parallel ranks), then the micro-batch
    to ``pack_multiple``; a micro-batch without sequences runs as a dummy of two tokens.
    """
    tokens = rows = 0
    for microbatch in (microbatch for rank in plan for microbatch in rank):
        tokens += sum(lengths[index] for index in microbatch)
        padded = sum(_up_to(lengths[index], sequence_multiple) for index in microbatch)
        rows += _up_to(padded or _up_to(DUMMY_TOKENS, sequence_multiple), pack_multiple)
    return 1.0 - tokens / rows if rows else 0.0


def _up_to(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def split_minibatches(n: int, minibatch_size: int, generator: torch.Generator | None = None) -> list[list[int]]:
    """Split 0..n-1, shuffled by ``generator`` (None: in order), into the fewest parts of at most ``minibatch_size``.

    Sizes differ by at most one: a short last part would move the weights as far as the others, with less evidence.
    """
    if minibatch_size < 1:
        raise ValueError(f"minibatch_size must be at least 1, got {minibatch_size}")
    order = list(range(n)) if generator is None else torch.randperm(n, generator=generator).tolist()
    num_parts = -(-n // minibatch_size)
    bounds = [part * n // num_parts for part in range(num_parts + 1)] if num_parts else [0]
    return [order[start:end] for start, end in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class _CostedSequences:
    """All sequences, longest first; the functions below name a sequence by its index in this order."""

    lengths: list[int]
    costs: list[float]


@dataclass
class _Microbatch:
    tokens: int = 0
    cost: float = 0.0
    sequences: list[int] = field(default_factory=list)

    def add(self, batch: _CostedSequences, sequence: int) -> None:
        self.sequences.append(sequence)
        self.tokens += batch.lengths[sequence]
        self.cost += batch.costs[sequence]

    def give(self, batch: _CostedSequences, sequence: int, target: "_Microbatch") -> None:
        self.sequences.remove(sequence)
        self.tokens -= batch.lengths[sequence]
        self.cost -= batch.costs[sequence]
        target.add(batch, sequence)


def _pack(batch: _CostedSequences, multiple: int, budget: int) -> list[_Microbatch]:
    """The fewest micro-batches, a multiple of ``multiple``, into which one of two greedy packings succeeds."""
    # Neither tokens beyond the budget nor two sequences of more than half of it fit into one micro-batch.
    by_tokens = -(-sum(min(length, budget) for length in batch.lengths) // budget)
    fewest = max(by_tokens, sum(2 * length > budget for length in batch.lengths))
    num_microbatches = -(-fewest // multiple) * multiple
    while True:
        packed = _fill_cheapest(batch, range(len(batch.lengths)), num_microbatches, budget)
        packed = packed or _best_fit(batch, num_microbatches, budget)
        if packed is not None:
            return packed
        num_microbatches += multiple


def _tight_budgets(batch: _CostedSequences, num_microbatches: int, budget: int) -> list[int]:
    """Budgets below ``budget`` that fill ``num_microbatches`` almost completely."""
    within = [length for length in batch.lengths if length <= budget]
    if not within:
        return []
    # A sequence beyond the budget has its own micro-batch, which no smaller budget changes.
    mean = sum(within) / (num_microbatches - len(batch.lengths) + len(within))
    tight = {max(within[0], math.ceil(mean * factor)) for factor in _TIGHT_BUDGETS}
    return sorted(number for number in tight if number < budget)


def _fill_cheapest(
    batch: _CostedSequences, longest_first: Iterable[int], num_microbatches: int, budget: int
) -> list[_Microbatch] | None:
    """Longest processing time first: each sequence goes to the cheapest micro-batch with room for it; None if there is no room."""
    packed = [_Microbatch() for _ in range(num_microbatches)]
    cheapest = [(0.0, place) for place in range(num_microbatches)]
    # Places without room for the present length, by tokens. Lengths fall, so a place waits once per sequence that it gets.
    waiting: list[tuple[int, int]] = []
    for sequence in longest_first:
        length = batch.lengths[sequence]
        while waiting and waiting[0][0] + length <= budget:
            place = heapq.heappop(waiting)[1]
            heapq.heappush(cheapest, (packed[place].cost, place))
        # An empty micro-batch has room for any sequence.
        while cheapest and 0 < packed[cheapest[0][1]].tokens > budget - length:
            place = heapq.heappop(cheapest)[1]
            heapq.heappush(waiting, (packed[place].tokens, place))
        if not cheapest:
            return None
        place = cheapest[0][1]
        packed[place].add(batch, sequence)
        heapq.heapreplace(cheapest, (packed[place].cost, place))
    return packed


def _best_fit(batch: _CostedSequences, num_microbatches: int, budget: int) -> list[_Microbatch] | None:
    """Best fit decreasing: each sequence goes to the fullest micro-batch with room for it; None if there is no room.

    Packs more tightly than ``_fill_cheapest``, without balance.
    """
    packed = [_Microbatch() for _ in range(num_microbatches)]
    by_room: list[tuple[int, int]] = []
    empty = list(reversed(range(num_microbatches)))
    for sequence, length in enumerate(batch.lengths):
        fullest = bisect_left(by_room, (length, -1))
        if fullest < len(by_room):
            place = by_room.pop(fullest)[1]
        elif empty:
            place = empty.pop()
        else:
            return None
        packed[place].add(batch, sequence)
        insort(by_room, (budget - packed[place].tokens, place))
    # A dummy costs a pass over the model, so the costliest micro-batches give sequences to the empty ones.
    divisible = [(-m.cost, place) for place, m in enumerate(packed) if len(m.sequences) > 1]
    heapq.heapify(divisible)
    while divisible and empty:
        place = heapq.heappop(divisible)[1]
        packed[place].give(batch, packed[place].sequences[0], packed[empty.pop()])
        if len(packed[place].sequences) > 1:
            heapq.heappush(divisible, (-packed[place].cost, place))
    return packed


def _distribute(batch: _CostedSequences, packed: list[_Microbatch], budget: int, num_dp_ranks: int) -> list[list[_Microbatch]]:
    """Rank -> its micro-batches: rounds of similar cost, heaviest first, each balanced and then assigned to the ranks."""
    rounds = []
    packed = sorted(packed, key=lambda microbatch: -microbatch.cost)
    while packed:
        members, packed = packed[:num_dp_ranks], packed[num_dp_ranks:]
        _even_out(batch, members, budget)
        if packed and _idle_share([[microbatch.cost for microbatch in members]]) > _WORTH_TOPPING_UP:
            # Sequences that are heavy alone share one round, so that not every round waits for one of them.
            by_longest = sorted([*members, *packed], key=lambda m: min(m.sequences, default=len(batch.lengths)))
            members, packed = by_longest[:num_dp_ranks], by_longest[num_dp_ranks:]
            _even_out(batch, members, budget)
            _top_up(batch, members, packed, budget)
            longest_first = sorted(sequence for microbatch in packed for sequence in microbatch.sequences)
            packed = _fill_cheapest(batch, longest_first, len(packed), budget) or packed
            packed.sort(key=lambda microbatch: -microbatch.cost)
        rounds.append(members)
    ranks = _assign_rounds(rounds, num_dp_ranks)
    _even_out_ranks(batch, ranks, budget)
    return ranks


def _even_out(batch: _CostedSequences, members: list[_Microbatch], budget: int) -> None:
    """Reduce the heaviest micro-batch of a round by moving or swapping sequences, while that helps."""
    mean = sum(microbatch.cost for microbatch in members) / len(members)
    for _ in range(_MAX_EXCHANGES_PER_RANK * len(members)):
        members.sort(key=lambda microbatch: microbatch.cost)
        heaviest = members[-1]
        pairs = ((heaviest, other, heaviest.cost, heaviest.cost - other.cost) for other in members[:-1][:_NUM_RECEIVERS])
        if heaviest.cost <= (1 + _EVEN_ENOUGH) * mean or not _exchange(batch, pairs, budget, _EVEN_ENOUGH * mean):
            return


def _even_out_ranks(batch: _CostedSequences, ranks: list[list[_Microbatch]], budget: int) -> None:
    """Reduce the heaviest rank in the same way; no micro-batch gets heavier than the heaviest of its round."""
    highest = [max(microbatch.cost for microbatch in members) for members in zip(*ranks, strict=True)]
    mean = sum(microbatch.cost for rank in ranks for microbatch in rank) / len(ranks)
    for _ in range(_MAX_EXCHANGES_PER_RANK * len(ranks)):
        total_of = [sum(microbatch.cost for microbatch in rank) for rank in ranks]
        *others, heaviest = sorted(range(len(ranks)), key=lambda rank: (total_of[rank], rank))
        pairs = (
            (own, other, limit, total_of[heaviest] - total_of[rank])
            for rank in others[:_NUM_RECEIVERS]
            for own in ranks[heaviest]
            for other, limit in zip(ranks[rank], highest, strict=True)
        )
        if total_of[heaviest] <= (1 + _EVEN_ENOUGH) * mean or not _exchange(batch, pairs, budget, _EVEN_ENOUGH * mean):
            return


def _exchange(
    batch: _CostedSequences, pairs: Iterable[tuple[_Microbatch, _Microbatch, float, float]], budget: int, least_gain: float
) -> bool:
    """Exchange sequences within the first of ``pairs`` (giver, receiver, limit, gap) that gains enough; False: none."""
    for giver, receiver, limit, gap in pairs:
        gain, given, taken = _best_exchange(batch, giver, receiver, limit, gap, budget)
        if gain > least_gain:
            giver.give(batch, given, receiver)
            if taken is not None:
                receiver.give(batch, taken, giver)
            return True
    return False


def _best_exchange(
    batch: _CostedSequences, giver: _Microbatch, receiver: _Microbatch, limit: float, gap: float, budget: int
) -> tuple[float, int, int | None]:
    """(gain, sequence of ``giver``, sequence of ``receiver`` or None): the exchange that best closes a cost ``gap``.

    The giver's cost falls by the difference of the two costs and the receiver's rises by it, so half of the gap is
    best; the gain is the decrease of the larger cost. The receiver stays within ``budget`` [tokens] and ``limit``
    [cost].
    """
    # None, a move without return, is the shortest return; a micro-batch keeps its last sequence.
    shortest_first = sorted(receiver.sequences, reverse=True)
    returns: list[int | None] = [*shortest_first]
    costs, lengths = [batch.costs[s] for s in shortest_first], [batch.lengths[s] for s in shortest_first]
    if len(giver.sequences) > 1:
        returns, costs, lengths = [None, *returns], [0.0, *costs], [0, *lengths]
    best: tuple[float, int, int | None] = (0.0, -1, None)
    for given in giver.sequences:
        within_budget = bisect_left(lengths, batch.lengths[given] - (budget - receiver.tokens))
        within_limit = bisect_left(costs, batch.costs[given] - (limit - receiver.cost))
        fits = max(within_budget, within_limit)
        nearest = bisect_left(costs, batch.costs[given] - gap / 2)
        for place in (max(fits, nearest - 1), max(fits, nearest)):
            if place < len(returns):
                difference = batch.costs[given] - costs[place]
                gain = min(difference, gap - difference)
                if gain > best[0]:
                    best = (gain, given, returns[place])
    return best


def _top_up(batch: _CostedSequences, members: Sequence[_Microbatch], later: Sequence[_Microbatch], budget: int) -> None:
    """Use a round's idle time: fill its members from ``later`` rounds, none above the heaviest.

    Otherwise a rank whose micro-batch is heavy because of one long sequence would finish last.
    """
    heaviest = max(microbatch.cost for microbatch in members)
    # Each keeps its longest sequence, so that none runs empty.
    offers = sorted((s, m) for m in later for s in sorted(m.sequences)[1:])
    for member in sorted(members, key=lambda microbatch: microbatch.cost):
        while True:
            # The longest that fits is also the heaviest that fits.
            by_tokens = bisect_left(offers, member.tokens - budget, key=lambda offer: -batch.lengths[offer[0]])
            by_cost = bisect_left(offers, member.cost - heaviest, key=lambda offer: -batch.costs[offer[0]])
            first = max(by_tokens, by_cost)
            if first == len(offers):
                break
            sequence, source = offers.pop(first)
            source.give(batch, sequence, member)


def _assign_rounds(rounds: Sequence[Sequence[_Microbatch]], num_dp_ranks: int) -> list[list[_Microbatch]]:
    """In every round the least loaded rank gets the heaviest micro-batch, the next rank the next, and so on."""
    ranks: list[list[_Microbatch]] = [[] for _ in range(num_dp_ranks)]
    load = [0.0] * num_dp_ranks
    for members in rounds:
        heaviest_first = sorted(members, key=lambda microbatch: -microbatch.cost)
        least_loaded_first = sorted(range(num_dp_ranks), key=lambda rank: (load[rank], rank))
        for rank, microbatch in zip(least_loaded_first, heaviest_first, strict=True):
            ranks[rank].append(microbatch)
            load[rank] += microbatch.cost
    return [_cheap_ends(rank) for rank in ranks]


def _cheap_ends(heaviest_first: list[_Microbatch]) -> list[_Microbatch]:
    """Order micro-batches with the cheapest at both ends and the heaviest in the middle."""
    cheapest_first = heaviest_first[::-1]
    return cheapest_first[0::2] + cheapest_first[1::2][::-1]


def _most_even(found: Sequence[list[list[_Microbatch]]]) -> list[list[_Microbatch]]:
    """The plan with the least idle time; among about equal plans the one with the most even rounds, in cost and tokens."""
    rank_idle = [_idle_share([[sum(m.cost for m in rank) for rank in ranks]]) for ranks in found]
    even = [ranks for ranks, idle in zip(found, rank_idle, strict=True) if idle <= min(rank_idle) + _EVEN_ENOUGH]

    def round_idle(ranks: list[list[_Microbatch]]) -> float:
        rounds = list(zip(*ranks, strict=True))
        by_cost = _idle_share([[m.cost for m in members] for members in rounds])
        return by_cost + _idle_share([[m.tokens for m in members] for members in rounds])

    return min(even, key=round_idle)


def _idle_share(rounds: Sequence[Sequence[float]]) -> float:
    """Idle share of ranks that wait for each other after each of ``rounds`` [round][rank]."""
    time = sum(max(members) for members in rounds)
    # Rounding may give an even plan slightly less than 0.
    return max(0.0, 1.0 - sum(map(sum, rounds)) / (len(rounds[0]) * time)) if time else 0.0
