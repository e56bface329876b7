"""Choice of a step's responses by over-sampling and dynamic sampling, with fake servers; the facts of a generate stage."""

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.config.schema import Config, Mode
from megatron_rl.data.sampler import PromptSampler
from megatron_rl.data.slots import SlotPool
from megatron_rl.data.trajectory import Prompt, Score, Segment, Trajectory
from megatron_rl.errors import UserError
from megatron_rl.step.collect import MAX_ROWS, ChildCpuClock, Collector, classify_group, generated_rows

NUM_SAMPLES = 3


class Engine:
    """Stand-in for the servers: response i ends after ``lengths(i)`` tokens, or is cut once enough is complete."""

    def __init__(self, lengths):
        self.lengths = lengths
        self.num_calls = 0

    def stop_dialogues(self, trajectories):
        pass

    async def generate(self, trajectories, *, step, window_tokens, is_enough=None, open_row=None):
        self.num_calls += 1
        for trajectory in sorted(trajectories, key=lambda t: self.lengths(t.id)):
            cut = is_enough is not None and is_enough()
            left = self.lengths(trajectory.id) - trajectory.num_response_tokens
            count = 1 if cut else min(left, window_tokens)
            reason = "abort" if cut else "stop" if count == left else "length"
            trajectory.segments.append(Segment((5,) * count, (-1.0,) * count, 0, reason, step))
        return {t.id: 0.5 for t in trajectories}


class Grader:
    """Response i is right when ``is_right(group, sample)``."""

    def __init__(self, is_right):
        self.is_right = is_right

    async def grade(self, trajectories, step):
        for t in trajectories:
            t.score = Score(self.is_right(t.group_id, t.sample_index))


def collector(*, lengths=lambda i: 4, is_right=lambda group, sample: 1.0, num_prompts=2, over_sampling=1.0, **settings):
    config = Config()
    config.schedule.mode = settings.get("mode", Mode.sync)
    config.batch.num_prompts_per_step, config.batch.num_samples_per_prompt = num_prompts, NUM_SAMPLES
    config.batch.max_response_tokens, config.batch.window_tokens = 100, settings.get("window_tokens", 0)
    config.rollout.over_sampling = over_sampling
    config.algorithm.dynamic_sampling.enabled = settings.get("dynamic", False)
    config.algorithm.dynamic_sampling.max_rounds = settings.get("max_rounds", 4)
    by_type = config.batch.num_samples_by_type = settings.get("by_type", {})
    prompts = [Prompt(str(i), (i,), type=["", *by_type][i % (1 + len(by_type))]) for i in range(50)]

    def start(prompt, id, *, group_id, sample_index):
        return Trajectory(id, prompt, group_id, sample_index, 100)

    num_slots = int(num_prompts * over_sampling) * NUM_SAMPLES
    sampler = PromptSampler(prompts, seed=0)
    pool = SlotPool(
        sampler, start, num_slots=num_slots, num_samples_per_prompt=NUM_SAMPLES, num_samples_by_type=by_type
    )
    engine = Engine(lengths)
    return Collector(config, pool, engine, Grader(is_right)), pool, engine


def collect(parts, step=0):
    return asyncio.run(parts[0].collect(step))


def test_every_trained_group_is_mixed_and_whole():
    """0 < accuracy < 1 in every group, discarded as a whole or not at all (DAPO, arXiv 2503.14476, eq. 11)."""
    found, metrics = collect(
        collector(is_right=lambda group, sample: float(group % 3 == 2 and sample == 0), dynamic=True)
    )
    groups = {}
    for t in found:
        groups.setdefault(t.group_id, []).append(t.score.value)
    assert all(sorted(scores) == [0.0, 0.0, 1.0] for scores in groups.values()) and len(groups) == 2
    assert metrics["dynamic_sampling/num_rounds"] == 3
    assert metrics["dynamic_sampling/all_wrong_share"] == pytest.approx(4 / 6)
    assert metrics["dynamic_sampling/reward_mean"] == pytest.approx(2 / 18)


@pytest.mark.parametrize("how", [{"dynamic": True, "max_rounds": 40}, {"over_sampling": 2.0}, {}])
def test_a_step_has_the_same_slots_and_whole_groups_whatever_the_sizes_by_type(how):
    by_type, num_prompts = {"large": 12, "small": 2}, 12  # the others have 3; a block has 12
    parts = collector(
        by_type=by_type,
        num_prompts=num_prompts,
        lengths=lambda i: 90 if i % 17 == 0 and how.get("over_sampling") else 4,
        is_right=lambda group, sample: float(group % 3 != 0 and sample == 0),
        **how,
    )
    for step in range(4):
        found, metrics = collect(parts, step)
        assert len(found) == num_prompts * NUM_SAMPLES and all(t.ended_naturally for t in found)
        groups = {}
        for t in found:
            groups.setdefault(t.group_id, []).append(t)
        for members in groups.values():
            assert len(members) == by_type.get(members[0].prompt.type, NUM_SAMPLES)
        if how.get("dynamic"):
            assert all(len({t.reward for t in members}) == 2 for members in groups.values())
            assert metrics["dynamic_sampling/num_left_over"] >= 0
        parts[1].discard([t for t in found])


def test_dynamic_sampling_error_reports_the_number_of_blocks():
    with pytest.raises(UserError, match=r"0 of 1 blocks of 6 responses whose"):
        collect(collector(dynamic=True, by_type={"a": 6}))


def test_dynamic_sampling_starts_no_round_more_than_it_needs_and_leaves_the_pool_empty():
    parts = collector(is_right=lambda group, sample: float(sample == 0), dynamic=True)
    found, _ = collect(parts)
    assert parts[2].num_calls == 1 and len(found) == 6 and not parts[1].state()["slots"]
    assert [t.group_id for t in collect(parts, 1)[0][::NUM_SAMPLES]] == [2, 3]


def test_dynamic_sampling_gives_up_after_its_rounds_and_says_what_it_saw():
    with pytest.raises(UserError, match=r"after 4 rounds.*0 of 2 groups.*8 entirely right.*select-prompts"):
        collect(collector(dynamic=True))


def test_a_group_with_an_unscored_member_is_not_mixed():
    group = [SimpleNamespace(reward=value, greedy=False) for value in (1.0, 0.0, None)]
    assert classify_group(group, 1.0) == "unscored" and classify_group(group[:2], 1.0) == "mixed"


@pytest.mark.parametrize(
    ("rewards", "kind"),
    [
        ((1.0, 0.0), "mixed"),
        ((0.2, 0.8), "mixed"),
        ((0.0, 0.99), "mixed"),
        ((1.0, 2.0), "mixed"),
        ((-1.0, 1.0), "mixed"),
        ((0.3, 0.3), "all_wrong"),
        ((0.0, 0.0), "all_wrong"),
        ((1.0, 1.0), "all_right"),
    ],
)
def test_a_group_is_kept_when_its_rewards_differ_whatever_their_range(rewards, kind):
    """std > 0, as in the public implementations: partial credit and judges' scores need not reach 1."""
    assert classify_group([SimpleNamespace(reward=value, greedy=False) for value in rewards], 1.0) == kind


def test_over_sampling_takes_the_groups_that_are_complete_first_and_drops_the_tail():
    slow = lambda i: 90 if i // NUM_SAMPLES == 1 else 4  # noqa: E731
    parts = collector(lengths=slow, over_sampling=2.0)
    found, metrics = collect(parts)
    assert len(found) == 6 and all(t.ended_naturally for t in found)
    assert 1 not in {t.group_id for t in found}
    assert metrics == {"rollout/num_carried": 0.0, "rollout/num_discarded": 6.0}
    assert {t.id for t in found} == {t["id"] for t in parts[1].state()["slots"]}


def test_over_sampling_in_windows_keeps_every_token_of_the_aborted():
    parts = collector(lengths=lambda i: 50, over_sampling=2.0, mode=Mode.tppo, window_tokens=10)
    found, metrics = collect(parts)
    assert sorted(t.window_tokens(0) for t in found) == [1] * 6 + [10] * 6
    assert metrics == {"rollout/num_carried": 0.0} and len(parts[1].state()["slots"]) == 12


def test_without_options_a_step_is_one_window_of_every_slot():
    parts = collector(lengths=lambda i: 12, mode=Mode.tppo, window_tokens=8)
    found, metrics = collect(parts)
    assert [t.window_tokens(0) for t in found] == [8] * 6 and metrics["rollout/num_carried"] == 0
    assert collect(parts, 1)[1]["rollout/num_carried"] == 6


def test_a_greedy_response_belongs_to_its_group_and_is_no_sample():
    """Over-sampling waits for it; dynamic sampling asks the samples alone."""
    group = [
        SimpleNamespace(reward=value, greedy=greedy) for value, greedy in ((1.0, False), (1.0, False), (0.0, True))
    ]
    assert classify_group(group, 1.0) == "all_right"
    unscored = [SimpleNamespace(reward=None, greedy=True), *group[:1], SimpleNamespace(reward=0.0, greedy=False)]
    assert classify_group(unscored, 1.0) == "mixed"


# ------------------------------------------------------------------------------------------ facts of a generate stage

STEP = 3


def response(id, *, prompt, held, new, ended):
    segments = [Segment((7,) * held, (-1.0,) * held, 0, "length", STEP - 1)] if held else []
    segments += [Segment((7,) * new, (-1.0,) * new, 0, "stop" if ended else "length", STEP)] if new else []
    return Trajectory(id, Prompt(str(id), (1,) * prompt), id, 0, 10_000, segments)


def numbers(words):
    return [int(word) for word in words.split()]


def test_every_row_is_written_down_in_its_order():
    rows = generated_rows(
        [
            response(0, prompt=3, held=5, new=4, ended=True),
            response(1, prompt=2, held=0, new=6, ended=False),
            response(2, prompt=9, held=8, new=0, ended=False),
        ],
        STEP,
        {0: 0.0124, 1: 1.5},
    )
    assert (rows["rows"], rows["tokens"]) == (3, 10)
    assert [numbers(rows[name]) for name in ("prompt", "held", "new", "ended", "ms")] == [
        [3, 2, 9],
        [5, 0, 8],
        [4, 6, 0],
        [1, 0, 0],
        [12, 1500, 0],
    ]


def test_of_very_many_rows_an_even_choice_with_the_longest_stands_for_all():
    lengths = np.random.default_rng(0).integers(1, 400, 3 * MAX_ROWS + 17)
    rows = generated_rows([response(i, prompt=1, held=0, new=int(n), ended=True) for i, n in enumerate(lengths)], STEP, {})
    kept = numbers(rows["new"])
    assert (rows["rows"], rows["tokens"]) == (len(lengths), lengths.sum())
    assert len(kept) == MAX_ROWS and max(kept) == lengths.max()
    assert abs(np.mean(kept) / lengths.mean() - 1) < 0.01


def test_the_time_of_children_counts_and_what_has_ended_is_not_forgotten():
    clock = ChildCpuClock()
    burn = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\ninput()"
    before = clock.cpu_s()
    child = subprocess.Popen([sys.executable, "-S", "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ)
    child.stdout.readline()
    assert 0.35 < clock.cpu_s() - before < 2.0
    after = clock.cpu_s()
    child.communicate(b"\n")
    assert clock.cpu_s() >= after
