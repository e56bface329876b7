"""Which sequences share a forward pass, and which rank runs it. Pure: no torch.distributed, no tensors of tokens.

"Pack first, distribute second": sequences are first packed into micro-batches, then the micro-batches are dealt to the
data-parallel ranks. Invariants, which the tests assert:

- every sequence is in exactly one micro-batch;
- every rank gets the same number of micro-batches (some may be empty), for they all meet in the same collectives;
- a micro-batch holds at most ``max_tokens`` tokens, except that a longer sequence has one of its own;
- the cost of two ranks differs by at most the cost of the dearest micro-batch;
- the plan depends on the arguments alone.
"""

import heapq
from collections.abc import Callable, Sequence

import torch

CostFunction = Callable[[int], float]
"""Length of a sequence [tokens] -> its cost, in any unit."""


def transformer_cost(hidden_size: int = 4096) -> CostFunction:
    """FLOPs of one sequence, in units of one token's linear layers.

    A layer's matrices cost about 24 * hidden^2 FLOPs a token (12 * hidden^2 weights), causal attention
    2 * hidden * length (half of the score and value products): a token costs 1 + length / (12 * hidden).
    """

    def cost(length: int) -> float:
        return length * (1.0 + length / (12.0 * hidden_size))

    return cost


def plan_microbatches(
    lengths: Sequence[int], num_ranks: int, max_tokens: int, cost: CostFunction | None = None
) -> list[list[list[int]]]:
    """Per rank, per micro-batch: the indices into ``lengths``, ascending. No sequences give no micro-batches.

    Raises ValueError for a length below 1, no ranks or no room for tokens.
    """
    if num_ranks < 1 or max_tokens < 1:
        raise ValueError(f"num_ranks and max_tokens must be at least 1, got {num_ranks} and {max_tokens}")
    empty = [index for index, length in enumerate(lengths) if length < 1]
    if empty:
        raise ValueError(f"sequence {empty[0]} has length {lengths[empty[0]]}; every sequence needs at least one token")
    costs = [(cost or transformer_cost())(length) for length in lengths]
    microbatches = _pack(lengths, costs, num_ranks, max_tokens)
    return _deal(microbatches, costs, num_ranks)


def split_minibatches(n: int, minibatch_size: int, generator: torch.Generator | None = None) -> list[list[int]]:
    """0..n-1, shuffled by ``generator`` (None: in order), in as few parts of at most ``minibatch_size`` as can be.

    The sizes differ by at most one: a short last part would move the weights as far as the others, on less evidence.
    """
    if minibatch_size < 1:
        raise ValueError(f"minibatch_size must be at least 1, got {minibatch_size}")
    order = list(range(n)) if generator is None else torch.randperm(n, generator=generator).tolist()
    num_parts = -(-n // minibatch_size)
    bounds = [part * n // num_parts for part in range(num_parts + 1)] if num_parts else [0]
    return [order[start:end] for start, end in zip(bounds, bounds[1:])]


def _pack(lengths: Sequence[int], costs: Sequence[float], num_ranks: int, max_tokens: int) -> list[list[int]]:
    """Micro-batches, a multiple of num_ranks, the fewest that the greedy packing can fill."""
    own = [[index] for index, length in enumerate(lengths) if length > max_tokens]
    rest = sorted((i for i, length in enumerate(lengths) if length <= max_tokens), key=lambda i: (-costs[i], i))
    tokens = sum(lengths[index] for index in rest)
    num_microbatches = _round_up(len(own) + -(-tokens // max_tokens), num_ranks)
    while True:
        packed = _fill(rest, lengths, costs, num_microbatches - len(own), max_tokens)
        if packed is not None:
            return own + packed
        num_microbatches += num_ranks


def _fill(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], num_bins: int, max_tokens: int
) -> list[list[int]] | None:
    """Longest processing time first: each sequence goes to the cheapest bin with room. None: some sequence had none."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [max_tokens] * num_bins
    cheapest = [(0.0, index) for index in range(num_bins)]
    for sequence in order:
        full = []
        while cheapest and room[cheapest[0][1]] < lengths[sequence]:
            full.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        load, index = heapq.heappop(cheapest)
        bins[index].append(sequence)
        room[index] -= lengths[sequence]
        for entry in [*full, (load + costs[sequence], index)]:
            heapq.heappush(cheapest, entry)
    return bins


def _deal(microbatches: list[list[int]], costs: Sequence[float], num_ranks: int) -> list[list[list[int]]]:
    """In rounds of num_ranks, dearest first: the poorest rank takes the dearest micro-batch of the round.

    Micro-batches that run at the same time on different ranks thereby cost about the same.
    """
    cost_of = [sum(costs[index] for index in microbatch) for microbatch in microbatches]
    order = sorted(range(len(microbatches)), key=lambda i: (-cost_of[i], i))
    plan: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    for start in range(0, len(order), num_ranks):
        poorest_first = sorted(range(num_ranks), key=lambda rank: (load[rank], rank))
        for rank, microbatch in zip(poorest_first, order[start : start + num_ranks], strict=True):
            plan[rank].append(sorted(microbatches[microbatch]))
            load[rank] += cost_of[microbatch]
    return plan


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
