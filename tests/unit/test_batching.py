"""Laws of packing and dealing: megatron_rl/training/batching.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.training.batching import plan_microbatches, split_minibatches, transformer_cost

LENGTHS = st.lists(st.integers(1, 200), max_size=80)
RANKS = st.integers(1, 8)
MAX_TOKENS = st.integers(1, 300)
LAW = settings(max_examples=60, deadline=None)


def microbatch_cost(microbatch: list[int], lengths: list[int]) -> float:
    return sum(transformer_cost()(lengths[index]) for index in microbatch)


@LAW
@given(LENGTHS, RANKS, MAX_TOKENS)
def test_every_sequence_is_in_exactly_one_microbatch(lengths, num_ranks, max_tokens):
    plan = plan_microbatches(lengths, num_ranks, max_tokens)
    assert sorted(i for rank in plan for microbatch in rank for i in microbatch) == list(range(len(lengths)))


@LAW
@given(LENGTHS, RANKS, MAX_TOKENS)
def test_every_rank_has_the_same_number_of_microbatches(lengths, num_ranks, max_tokens):
    plan = plan_microbatches(lengths, num_ranks, max_tokens)
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert bool(plan[0]) == bool(lengths)


@LAW
@given(LENGTHS, RANKS, MAX_TOKENS)
def test_a_microbatch_keeps_the_budget_or_is_one_longer_sequence(lengths, num_ranks, max_tokens):
    for rank in plan_microbatches(lengths, num_ranks, max_tokens):
        for microbatch in rank:
            assert sum(lengths[i] for i in microbatch) <= max_tokens or len(microbatch) == 1


@LAW
@given(LENGTHS, RANKS, MAX_TOKENS)
def test_rank_costs_differ_by_at_most_the_dearest_microbatch(lengths, num_ranks, max_tokens):
    plan = plan_microbatches(lengths, num_ranks, max_tokens)
    loads = [sum(microbatch_cost(m, lengths) for m in rank) for rank in plan]
    dearest = max((microbatch_cost(m, lengths) for rank in plan for m in rank), default=0.0)
    assert max(loads) - min(loads) <= dearest + 1e-6


@LAW
@given(LENGTHS, RANKS, MAX_TOKENS)
def test_the_plan_is_deterministic(lengths, num_ranks, max_tokens):
    assert plan_microbatches(lengths, num_ranks, max_tokens) == plan_microbatches(tuple(lengths), num_ranks, max_tokens)


@LAW
@given(st.lists(st.integers(1, 64), min_size=64, max_size=200), st.integers(1, 4))
def test_many_short_sequences_waste_less_than_half_of_the_microbatches(lengths, num_ranks):
    plan = plan_microbatches(lengths, num_ranks, 256)
    needed = -(-sum(lengths) // 256)
    assert sum(len(rank) for rank in plan) <= 2 * needed + num_ranks


def test_one_round_is_balanced_by_cost_and_not_by_tokens():
    """One sequence of 4000 costs as much as many short ones with more tokens: a quadratic cost must show."""
    lengths = [4000] + [100] * 80
    plan = plan_microbatches(lengths, 2, 20000, cost=lambda length: float(length * length))
    assert plan[0] == [[0]]
    assert plan[1] == [list(range(1, 81))]


def test_attention_makes_long_sequences_dearer_than_their_tokens():
    cost = transformer_cost(hidden_size=64)
    assert cost(2000) > 2 * cost(1000)
    assert cost(768) == pytest.approx(2 * 768)


@pytest.mark.parametrize("arguments", [([1, 0], 1, 8), ([1], 0, 8), ([1], 1, 0)])
def test_impossible_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match="at least"):
        plan_microbatches(*arguments)


@LAW
@given(st.integers(0, 300), st.integers(1, 64), st.integers(0, 5))
def test_minibatches_partition_and_differ_by_at_most_one(n, size, seed):
    parts = split_minibatches(n, size, torch.Generator().manual_seed(seed))
    assert sorted(i for part in parts for i in part) == list(range(n))
    assert len(parts) == -(-n // size)
    sizes = [len(part) for part in parts]
    assert max(sizes, default=0) <= size
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def test_minibatches_shuffle_with_the_generator_and_keep_the_order_without():
    assert split_minibatches(5, 2) == [[0], [1, 2], [3, 4]]
    first = split_minibatches(50, 10, torch.Generator().manual_seed(1))
    assert first == split_minibatches(50, 10, torch.Generator().manual_seed(1))
    assert first != split_minibatches(50, 10, torch.Generator().manual_seed(2))
