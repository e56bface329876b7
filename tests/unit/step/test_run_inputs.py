"""Window edges move from response to response, so that every position is trained inside some window."""

import functools
import math
from collections import Counter

import pytest

from megatron_rl.config.schema import Config, Mode
from megatron_rl.data.prompts import PromptSet
from megatron_rl.data.trajectory import Prompt, Segment, Trajectory
from megatron_rl.step.run_inputs import _new_trajectory, _slot_pool, first_window_tokens


def config(*, window=64, jitter=16, budget=200, n_ignore=8, mode=Mode.tppo, seed=0):
    made = Config()
    made.schedule.mode, made.run.seed = mode, seed
    made.batch.window_tokens, made.batch.max_response_tokens = window, budget
    made.batch.window_jitter_tokens, made.algorithm.ignore_boundary_tokens = jitter, n_ignore
    return made


def edges(settings, id):
    """(lengths of the windows of a response of the whole budget, positions where an unfinished window ends)."""
    trajectory = Trajectory(id, Prompt("p", (1,)), id, 0, settings.batch.max_response_tokens)
    trajectory.first_window_tokens = first_window_tokens(settings, id)
    lengths = []
    while not trajectory.finished:
        step = len(lengths)
        left = trajectory.max_response_tokens - trajectory.num_response_tokens
        count = min(trajectory.remaining_window(step, settings.batch.window_tokens), left)
        trajectory.segments.append(Segment((7,) * count, (-1.0,) * count, 0, "length", step))
        assert trajectory.remaining_window(step, settings.batch.window_tokens) == 0 or trajectory.finished
        lengths.append(count)
    ends = [sum(lengths[: k + 1]) for k in range(len(lengths) - 1)]
    return lengths, ends


@pytest.mark.parametrize(
    ("window", "jitter", "n_ignore"), [(64, 16, 8), (64, 128, 8), (10, 4, 2), (7, 7, 3), (4, 4, 2)]
)
def test_every_position_trains_in_some_response_and_edges_are_spread(window, jitter, n_ignore):
    settings = config(window=window, jitter=jitter, n_ignore=n_ignore, budget=3 * window)
    first_edges, times_left_out = [], [0] * settings.batch.max_response_tokens
    for id in range(600):
        lengths, ends = edges(settings, id)
        assert sum(lengths) == settings.batch.max_response_tokens
        assert window - min(jitter, window) < lengths[0] <= window and all(n == window for n in lengths[1:-1])
        assert len(lengths) <= math.ceil(settings.batch.max_response_tokens / window) + 1
        first_edges.append(ends[0])
        for end in ends:
            for position in range(max(end - n_ignore, end - window, 0), end):
                times_left_out[position] += 1
    assert set(first_edges) == set(range(window - min(jitter, window) + 1, window + 1))
    # A position is left out with a chance of about n_ignore / jitter, and never always.
    assert max(times_left_out) < 600 * min(0.95, n_ignore / min(jitter, window) + 0.1)


def test_without_jitter_the_same_positions_are_left_out_of_every_response():
    settings = config(jitter=0)
    assert {tuple(edges(settings, id)[1]) for id in range(50)} == {(64, 128, 192)}


@pytest.mark.parametrize(("window", "jitter", "budget"), [(64, 4, 192), (64, 16, 192), (100, 0, 206), (100, 0, 207), (64, 8, 66)])
def test_a_small_rest_of_the_budget_goes_along_with_the_window_before(window, jitter, budget):
    """Up to a sixteenth of a window; one token more is a window of its own."""
    settings = config(window=window, jitter=jitter, budget=budget)
    for id in range(200):
        lengths, _ = edges(settings, id)
        full = [first_window_tokens(settings, id) or window]
        while sum(full) < budget:
            full.append(window)
        rest = budget - sum(full[:-1])
        expected = [*full[:-1], rest] if rest > window // 16 or len(full) == 1 else [*full[:-2], full[-2] + rest]
        assert lengths == expected


def test_first_windows_follow_from_seed_and_response_alone():
    one, again, other = ([first_window_tokens(config(seed=s), id) for id in range(40)] for s in (3, 3, 4))
    assert one == again != other


@pytest.mark.parametrize("change", [{"mode": Mode.sync}, {"window": 0}, {"window": 200}, {"jitter": 0}])
def test_full_responses_have_no_first_window(change):
    assert first_window_tokens(config(**change), 5) == 0


@pytest.mark.parametrize(("advantage", "num_greedy"), [("remax", 1), ("rloo", 0)])
def test_a_pool_has_one_greedy_response_per_prompt_where_the_advantage_compares_with_it(advantage, num_greedy):
    settings = config(mode=Mode.sync, window=0)
    settings.algorithm.advantage = advantage
    settings.batch.num_prompts_per_step, settings.batch.num_samples_per_prompt = 3, 2
    prompts = PromptSet(tuple(Prompt(str(i), (i,)) for i in range(5)), 0)
    pool = _slot_pool(settings, prompts, functools.partial(_new_trajectory, settings, None))
    slots = pool.fill()
    assert len(slots) == 3 * (2 + num_greedy)
    by_group = Counter((t.group_id, t.greedy) for t in slots)
    assert all(by_group[group, False] == 2 and by_group[group, True] == num_greedy for group in range(3))
    again = [Trajectory.from_dict(t.to_dict()).greedy for t in slots]
    assert again == [t.greedy for t in slots]


def test_a_type_with_more_samples_than_the_others_has_no_greedy_one_among_them():
    settings = config(mode=Mode.sync, window=0)
    settings.algorithm.advantage = "egae"
    settings.batch.num_prompts_per_step, settings.batch.num_samples_per_prompt = 4, 1
    settings.batch.num_samples_by_type = {"many": 4}
    prompts = PromptSet(tuple(Prompt(str(i), (i,), type="many") for i in range(5)), 0)
    slots = _slot_pool(settings, prompts, functools.partial(_new_trajectory, settings, None)).fill()
    assert {t.sample_index for t in slots} == {0, 1, 2, 3} and not any(t.greedy for t in slots)
