"""The slot pool's laws: T-PPO's successive batching (T-PPO, arXiv 2506.15050)."""

import json
import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.sampler import PromptSampler
from megatron_rl.data.slots import SlotPool
from megatron_rl.data.trajectory import Prompt, Segment, Trajectory
from megatron_rl.errors import DataError

PROMPTS = [Prompt(id=str(i), token_ids=(i,)) for i in range(7)]


SIZES = st.sampled_from([(4, 1), (8, 1), (8, 4, 2), (2, 6, 3), (1, 4), (3, 3)])
"""Responses per prompt: default, and for the types a and b."""


def typed_pool(sizes, num_blocks, *, mixture=None, seed=0, prompts=30):
    types = ["", *"ab"][: len(sizes)]
    prompts = [Prompt(id=str(i), token_ids=(i,), type=types[i * 7 % len(types)]) for i in range(prompts)]

    def start(prompt, id, *, group_id, sample_index):
        return Trajectory(id, prompt, group_id, sample_index, max_response_tokens=10)

    sampler = PromptSampler(prompts, seed=seed, mixture=mixture)
    return SlotPool(
        sampler,
        start,
        num_slots=num_blocks * max(sizes),
        num_samples_per_prompt=sizes[0],
        num_samples_by_type=dict(zip(types[1:], sizes[1:], strict=True)),
    )


def plain(trajectories):
    """Comparable fields of trajectories."""
    return [json.dumps(t.to_dict(), default=np.ndarray.tolist) for t in trajectories]


def finish(trajectories, step=0):
    for trajectory in trajectories:
        trajectory.segments.append(Segment((1,), (0.0,), step, "stop", step))


@given(sizes=SIZES, num_blocks=st.integers(1, 5), seed=st.integers(0, 9))
def test_whole_responses_fill_slots_with_whole_groups_of_each_type(sizes, num_blocks, seed):
    pool, by_type = typed_pool(sizes, num_blocks, seed=seed), dict(zip(["", "a", "b"], sizes))
    for step in range(8):
        batch = pool.fill(step)
        assert len(batch) == num_blocks * max(sizes)
        groups = Counter(t.group_id for t in batch)
        assert all(groups[t.group_id] == by_type[t.prompt.type] for t in batch)
        assert all(len({t.prompt.id for t in batch if t.group_id == group}) == 1 for group in groups)
        assert sorted((t.group_id, t.sample_index) for t in batch) == sorted(
            (group, i) for group, size in groups.items() for i in range(size)
        )
        finish(batch, step)
        assert len(pool.release_finished()) == len(batch)


def test_mixture_weights_count_prompts_not_samples():
    pool = typed_pool((8, 1, 2), 4, mixture={"": 1, "a": 2, "b": 1}, prompts=60)
    groups = Counter()
    for step in range(50):
        batch = pool.fill(step)
        groups.update({(t.group_id, t.prompt.type) for t in batch})
        finish(batch, step)
        pool.release_finished()
    seen = Counter(type_ for _, type_ in groups)
    total = seen.total()
    # Up to the block of each size that is not full yet.
    assert abs(seen["a"] - total / 2) <= 8 and abs(seen[""] - total / 4) <= 8 and abs(seen["b"] - total / 4) <= 8


@given(sizes=SIZES, num_blocks=st.integers(1, 3), num_before=st.integers(0, 5), window=st.integers(1, 10))
def test_resumed_pool_continues_with_the_waiting_groups(sizes, num_blocks, num_before, window):
    def steps(pool, first, count):
        seen = []
        for step in range(first, first + count):
            batch = pool.fill(step)
            seen.append([(t.id, t.group_id, t.prompt.id, t.num_response_tokens) for t in batch])
            for t in batch:
                grow(t, window, step, [1 + i * 5 % 13 for i in range(1000)])
            pool.release_finished()
        return seen

    whole = typed_pool(sizes, num_blocks)
    expected = steps(whole, 0, num_before + 4)[num_before:]
    first = typed_pool(sizes, num_blocks)
    steps(first, 0, num_before)
    again = typed_pool(sizes, num_blocks)
    again.load_state(json.loads(json.dumps(first.state(), default=np.ndarray.tolist)))
    assert steps(again, num_before, 4) == expected


def test_waiting_groups_of_changed_sizes_are_rejected():
    pool = typed_pool((4, 1), 1)
    while not (state := pool.state())["waiting"]:
        finish(pool.fill())
        pool.release_finished()
    with pytest.raises(DataError, match="batch.num_samples_by_type: in the checkpoint 1 responses.*'a' wait, but it has 2 now"):
        typed_pool((4, 2), 1).load_state(state)


def make_pool(num_slots=12, num_samples=4, budget=10, seed=0):
    sampler = PromptSampler(PROMPTS, seed=seed)

    def start(prompt, id, *, group_id, sample_index):
        return Trajectory(id, prompt, group_id, sample_index, max_response_tokens=budget)

    return SlotPool(sampler, start, num_slots=num_slots, num_samples_per_prompt=num_samples)


def grow(trajectory, window, step, lengths):
    """Fake generation: the response of trajectory i ends after lengths[i] tokens."""
    left = lengths[trajectory.id] - trajectory.num_response_tokens
    room = min(window, trajectory.max_response_tokens - trajectory.num_response_tokens)
    count = min(left, room)
    start = trajectory.num_response_tokens
    reason = "stop" if left <= room else "length"
    trajectory.segments.append(Segment(tuple(range(start, start + count)), (0.0,) * count, step, reason, step))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 12), st.randoms(use_true_random=False))
def test_slots_are_constant_and_no_token_is_lost_or_duplicated(
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
            assert trajectory.response_ids.tolist() == list(range(min(lengths[trajectory.id], budget)))
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
            trajectory.old_values.append(np.full(trajectory.window_tokens(step), 0.5, np.float32))
        pool.release_finished()
    state = json.loads(json.dumps(pool.state(), default=np.ndarray.tolist))
    twin = make_pool()
    twin.load_state(state)
    for step in range(3, 9):
        one, two = pool.fill(), twin.fill()
        assert plain(one) == plain(two)
        for trajectory in (*one, *two):
            grow(trajectory, 3, step, lengths)
        assert plain(pool.release_finished()) == plain(twin.release_finished())


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
