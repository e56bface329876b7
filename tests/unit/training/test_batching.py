"""Laws of packing micro-batches and assigning them to ranks: megatron_rl/training/batching.py."""

import itertools
import math
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.training.batching import padding_fraction, plan_microbatches, plan_statistics, split_minibatches

LENGTHS = st.lists(st.integers(1, 200), max_size=80)
RANKS = st.integers(1, 8)
MAX_TOKENS = st.integers(1, 300)
MULTIPLES = st.integers(1, 3)
LAW = settings(max_examples=60, deadline=None)


def cost(length: int) -> float:
    """Cost with attention: a sequence of 100 tokens costs twice its tokens."""
    return length * (1.0 + length / 100)


def plan_of(lengths, num_ranks, max_tokens, multiple_of=1):
    return plan_microbatches(lengths, num_ranks, max_tokens, cost=cost, multiple_of=multiple_of)


def microbatch_cost(microbatch: list[int], lengths: list[int]) -> float:
    return sum(cost(lengths[index]) for index in microbatch)


@LAW
@given(LENGTHS, RANKS, MAX_TOKENS, MULTIPLES)
def test_every_sequence_is_in_exactly_one_microbatch(lengths, num_ranks, max_tokens, multiple_of):
    plan = plan_of(lengths, num_ranks, max_tokens, multiple_of)
    assert sorted(i for rank in plan for microbatch in rank for i in microbatch) == list(range(len(lengths)))


@LAW
@given(LENGTHS, RANKS, MAX_TOKENS, MULTIPLES)
def test_every_rank_has_the_same_number_of_microbatches(lengths, num_ranks, max_tokens, multiple_of):
    plan = plan_of(lengths, num_ranks, max_tokens, multiple_of)
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) % multiple_of == 0
    assert bool(plan[0]) == bool(lengths)


@LAW
@given(LENGTHS, RANKS, MAX_TOKENS)
def test_a_microbatch_keeps_the_budget_or_is_one_longer_sequence(lengths, num_ranks, max_tokens):
    for rank in plan_of(lengths, num_ranks, max_tokens):
        for microbatch in rank:
            assert sum(lengths[i] for i in microbatch) <= max_tokens or len(microbatch) == 1


@LAW
@given(LENGTHS, RANKS, MAX_TOKENS, MULTIPLES)
def test_microbatches_are_empty_only_with_fewer_sequences_than_microbatches(lengths, num_ranks, max_tokens, multiple_of):
    plan = plan_of(lengths, num_ranks, max_tokens, multiple_of)
    num_microbatches = sum(len(rank) for rank in plan)
    num_empty = sum(not microbatch for rank in plan for microbatch in rank)
    assert num_empty == max(0, num_microbatches - len(lengths))


@settings(LAW, derandomize=True)
@given(LENGTHS, RANKS, MAX_TOKENS)
def test_rank_costs_differ_by_at_most_the_largest_difference_within_a_round(lengths, num_ranks, max_tokens):
    plan = plan_of(lengths, num_ranks, max_tokens)
    cost_of = [[microbatch_cost(m, lengths) for m in rank] for rank in plan]
    loads = [sum(rank) for rank in cost_of]
    within_a_round = max((max(members) - min(members) for members in zip(*cost_of)), default=0.0)
    assert max(loads) - min(loads) <= within_a_round + 1e-6


@LAW
@given(LENGTHS, RANKS, MAX_TOKENS)
def test_the_plan_is_deterministic(lengths, num_ranks, max_tokens):
    assert plan_of(lengths, num_ranks, max_tokens) == plan_of(tuple(lengths), num_ranks, max_tokens)


@LAW
@given(LENGTHS, RANKS, MAX_TOKENS, st.randoms(use_true_random=False))
def test_shuffled_sequences_give_the_same_plan_of_lengths(lengths, num_ranks, max_tokens, shuffle):
    def plan_of_lengths(given_lengths: list[int]) -> list[list[list[int]]]:
        plan = plan_of(given_lengths, num_ranks, max_tokens)
        return [[sorted(given_lengths[i] for i in microbatch) for microbatch in rank] for rank in plan]

    shuffled = list(lengths)
    shuffle.shuffle(shuffled)
    assert plan_of_lengths(shuffled) == plan_of_lengths(lengths)


@LAW
@given(st.lists(st.integers(1, 64), min_size=64, max_size=200), st.integers(1, 4))
def test_short_sequences_need_no_microbatch_beyond_their_tokens(lengths, num_ranks):
    """Sequences have at most a quarter of the budget: rounding up to the ranks leaves room, which the packing must find."""
    plan = plan_of(lengths, num_ranks, 256)
    assert len(plan[0]) <= math.ceil(sum(lengths) / 256 / num_ranks + 0.1)


def partitions(items: list[int], max_tokens: int) -> Iterator[list[list[int]]]:
    """All partitions of ``items`` (lengths) into bins of at most ``max_tokens``."""
    if not items:
        yield []
        return
    for bins in partitions(items[1:], max_tokens):
        yield [[items[0]], *bins]
        for place, members in enumerate(bins):
            if items[0] + sum(members) <= max_tokens:
                yield [*bins[:place], [items[0], *members], *bins[place + 1 :]]


def test_small_batches_take_as_few_microbatches_as_any_packing():
    """Brute force over all packings of 400 random batches of up to 7 sequences."""
    draw = random.Random(1)
    for _ in range(400):
        lengths = [draw.randint(1, 60) for _ in range(draw.randint(1, 7))]
        num_ranks = draw.randint(1, 3)
        fewest = min(len(bins) for bins in partitions(lengths, 60))
        assert len(plan_of(lengths, num_ranks, 60)[0]) == math.ceil(fewest / num_ranks)


def test_one_round_of_small_batches_is_near_the_optimum():
    """Brute force over all 3^n assignments: at most 1.15 times the optimum, 1.01 times on average (LPT alone: 4/3)."""
    draw, ratios = random.Random(2), []
    for _ in range(100):
        lengths = [draw.randint(1, 60) for _ in range(draw.randint(3, 7))]
        loads = []
        for places in itertools.product(range(3), repeat=len(lengths)):
            load = [0.0] * 3
            for place, length in zip(places, lengths):
                load[place] += cost(length)
            loads.append(max(load))
        plan = plan_of(lengths, 3, 10_000)
        assert len(plan[0]) == 1
        ratios.append(max(microbatch_cost(rank[0], lengths) for rank in plan) / min(loads))
    assert max(ratios) <= 1.15
    assert sum(ratios) / len(ratios) <= 1.01


def long_tailed_lengths(count: int, seed: int) -> list[int]:
    """Log-normal with a median of 2,000 tokens, at most 24,576: a few percent have most of the attention's cost."""
    draw = random.Random(seed)
    return [min(24_576, max(32, int(draw.lognormvariate(math.log(2000), 1.0)))) for _ in range(count)]


def attention_cost(length: int) -> float:
    """Cost with 7 billion parameters: the longest sequence costs 1.5 times its tokens."""
    return length * (1.0 + length / 49_152)


@pytest.mark.parametrize("seed", range(3))
def test_padding_and_imbalance_of_a_long_tailed_batch_stay_below_two_per_cent(seed):
    lengths = long_tailed_lengths(8192, seed)
    plan = plan_microbatches(lengths, 32, 32_768, cost=attention_cost)
    statistics = plan_statistics(plan, lengths, attention_cost)
    assert statistics["num_microbatches"] == math.ceil(sum(lengths) / 32_768 / 32)
    assert statistics["num_stand_ins"] == 0
    assert statistics["rank_imbalance"] < 0.002
    assert statistics["microbatch_imbalance"] + statistics["padding_share"] < 0.02


@pytest.mark.parametrize("seed", range(4))
def test_ranks_are_rarely_idle_in_a_batch_of_few_rounds(seed):
    """Two rounds of 32 ranks: a micro-batch with a very long sequence costs a third more than the others."""
    lengths = long_tailed_lengths(512, seed)
    statistics = plan_statistics(plan_microbatches(lengths, 32, 32_768, cost=attention_cost), lengths, attention_cost)
    assert statistics["num_microbatches"] == 2
    assert statistics["rank_imbalance"] < 0.01
    assert statistics["microbatch_imbalance"] < 0.01


def test_cheap_microbatches_run_first_and_last():
    lengths = long_tailed_lengths(300, seed=5)
    plan = plan_microbatches(lengths, 4, 32_768, cost=attention_cost)
    rounds = list(zip(*([sum(attention_cost(lengths[i]) for i in m) for m in rank] for rank in plan)))
    heaviest = [max(members) for members in rounds]
    top = heaviest.index(max(heaviest))
    assert 0 < top < len(heaviest) - 1
    assert heaviest[: top + 1] == sorted(heaviest[: top + 1])
    assert heaviest[top:] == sorted(heaviest[top:], reverse=True)


def test_statistics_equal_those_computed_by_hand():
    lengths = [4, 2, 3, 1, 6]
    plan = [[[0], [1, 2]], [[3, 4], []]]
    statistics = plan_statistics(plan, lengths, lambda length: 2.0 * length)
    assert (statistics["num_microbatches"], statistics["num_stand_ins"]) == (2, 1)
    # Totals 9 and 7 of at most 9; rounds (4, 7) and (5, 0) last 7 + 5.
    assert statistics["rank_imbalance"] == pytest.approx(1 - 16 / 18)
    assert statistics["microbatch_imbalance"] == pytest.approx(1 - 16 / 24)
    assert statistics["padding_share"] == pytest.approx(1 - 16 / 24)


def test_statistics_of_no_sequences_are_even():
    statistics = plan_statistics(plan_of([], 3, 10), [], cost)
    assert (statistics["num_microbatches"], statistics["rank_imbalance"], statistics["padding_share"]) == (0, 0.0, 0.0)


def test_padding_counts_sequences_microbatches_and_dummies():
    plan, lengths = [[[0, 1], [2]], [[3], []]], [3, 5, 4, 8]
    assert padding_fraction(plan, lengths) == pytest.approx(1 - 20 / 22)
    # 4 + 8, 4, 8 and a stand-in of 4; then every pack to a multiple of 8.
    assert padding_fraction(plan, lengths, sequence_multiple=4, pack_multiple=8) == pytest.approx(1 - 20 / (16 + 8 + 8 + 8))
    assert padding_fraction([[], []], []) == 0.0


def test_one_round_is_balanced_by_cost_and_not_by_tokens():
    """One sequence of 4000 costs as much as many short ones with more tokens: a quadratic cost must show."""
    lengths = [4000] + [100] * 80
    plan = plan_microbatches(lengths, 2, 20000, cost=lambda length: float(length * length))
    assert plan[0] == [[0]]
    assert plan[1] == [list(range(1, 81))]


def test_other_ranks_take_the_work_while_one_runs_a_sequence_beyond_the_budget():
    """The rank with the long sequence must not finish last: the others do the remaining work in that round."""
    lengths = [1000, *[50] * 60]
    statistics = plan_statistics(plan_of(lengths, 4, 400), lengths, cost)
    longest = cost(1000)
    ideal = 1 - sum(map(cost, lengths)) / (4 * longest)
    assert statistics["rank_imbalance"] < ideal + 0.03


ARGUMENTS = [([1, 0], 1, 8, 1), ([1], 0, 8, 1), ([1], 1, 0, 1), ([1], 1, 8, 0)]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_impossible_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match="at least"):
        plan_of(*arguments)


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
