"""The slot pool's laws: T-PPO's successive batching (T-PPO, arXiv 2506.15050)."""

import json
import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.sampler import PromptSampler
from megatron_rl.data.slots import SlotPool
from megatron_rl.data.trajectory import Prompt, Segment, Trajectory

PROMPTS = [Prompt(id=str(i), token_ids=(i,)) for i in range(7)]


def make_pool(num_slots=12, num_samples=4, budget=10, seed=0):
    sampler = PromptSampler(PROMPTS, seed=seed)

    def start(prompt, id, *, group_id, sample_index):
        return Trajectory(id, prompt, group_id, sample_index, max_response_tokens=budget)

    return SlotPool(sampler, start, num_slots=num_slots, num_samples_per_prompt=num_samples)


def grow(trajectory, window, step, lengths):
    """Stand in for the engine: the response of trajectory i ends after lengths[i] tokens."""
    left = lengths[trajectory.id] - trajectory.num_response_tokens
    room = min(window, trajectory.max_response_tokens - trajectory.num_response_tokens)
    count = min(left, room)
    start = trajectory.num_response_tokens
    reason = "stop" if left <= room else "length"
    trajectory.segments.append(Segment(tuple(range(start, start + count)), (0.0,) * count, step, reason, step))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 12), st.randoms(use_true_random=False))
def test_slots_are_constant_carried_come_first_and_no_token_is_lost_or_doubled(
    slots, samples, budget, rng: random.Random
):
    pool, window = make_pool(slots, samples, budget), 3
    lengths = [rng.randint(1, 2 * budget) for _ in range(500)]
    carried, finished_ids = [], Counter()
    for step in range(12):
        batch = pool.fill()
        assert len(batch) == slots
        assert [t.id for t in batch[: len(carried)]] == [t.id for t in carried]
        for trajectory in batch:
            grow(trajectory, window, step, lengths)
        done = pool.release_finished()
        carried = [t for t in batch if not t.finished]
        assert len(done) + len(carried) == slots
        finished_ids.update(t.id for t in done)
        for trajectory in done:
            assert trajectory.response_ids == list(range(min(lengths[trajectory.id], budget)))
    assert all(count == 1 for count in finished_ids.values())


def test_every_response_leaves_after_budget_over_window_steps():
    pool, window, budget = make_pool(budget=10), 4, 10
    first = pool.fill()
    for step in range(math.ceil(budget / window)):
        for trajectory in pool.fill():
            grow(trajectory, window, step, [10**6] * 1000)
        done = pool.release_finished()
    assert {t.id for t in first} <= {t.id for t in done}


def test_a_stop_token_on_the_last_slot_of_a_window_finishes_the_response():
    pool = make_pool(num_slots=1, num_samples=1, budget=10)
    (trajectory,) = pool.fill()
    grow(trajectory, 4, 0, [4] * 100)
    assert trajectory.segments[-1].finish_reason == "stop"
    assert pool.release_finished() == [trajectory]


def test_a_restored_pool_gives_the_identical_next_batches():
    pool, lengths = make_pool(), [1 + i % 9 for i in range(1000)]
    for step in range(3):
        for trajectory in pool.fill():
            grow(trajectory, 3, step, lengths)
            trajectory.old_values.extend([0.5] * trajectory.window_tokens(step))
        pool.release_finished()
    state = json.loads(json.dumps(pool.state()))
    twin = make_pool()
    twin.load_state(state)
    for step in range(3, 9):
        one, two = pool.fill(), twin.fill()
        assert one == two
        for trajectory in (*one, *two):
            grow(trajectory, 3, step, lengths)
        assert pool.release_finished() == twin.release_finished()


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_shows_every_prompt_once(shuffle):
    sampler = PromptSampler(PROMPTS, seed=3, shuffle=shuffle)
    for _ in range(3):
        assert sorted(sampler.draw().id for _ in PROMPTS) == [p.id for p in PROMPTS]


def test_members_of_a_group_share_prompt_and_group_id():
    groups = Counter((t.group_id, t.prompt.id) for t in make_pool(num_slots=12, num_samples=4).fill())
    assert list(groups.values()) == [4, 4, 4]


def test_discarded_trajectories_leave_their_slots_to_fresh_ones():
    pool = make_pool(num_slots=8, num_samples=4)
    first = pool.fill()
    pool.discard(first[2:6])
    pool.discard(first[2:4])
    assert [t.id for t in pool.fill()] == [0, 1, 6, 7, 8, 9, 10, 11]
