"""Which updates a step takes: the laws of T-PPO (arXiv 2506.15050) that the loop itself keeps."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.algorithms.mismatch import MismatchStats
from megatron_rl.config.schema import Config, HealthAction, HealthConfig, OldPolicy, TrainsOn
from megatron_rl.data.batch import PackedBatch, cu_seqlens_of
from megatron_rl.data.trajectory import Prompt, Score, Segment, Trajectory
from megatron_rl.step.loop import LoopComponents, TrainingLoop
from megatron_rl.step.packing import window_batch
from megatron_rl.step.parity import EngineMismatch, Parity
from megatron_rl.step.scoring import ResponseScorer
from megatron_rl.step.state import StepState
from megatron_rl.step.watchdog import Rollback, TrainingCollapsed, Watchdog
from megatron_rl.training.engine import UpdateResult
from megatron_rl.training.trainer_group import TrainerGroup


class RecordingGroup:
    """Stands in for the trainer ranks: remembers the updates it was asked for."""

    def __init__(self):
        self.updates = []

    def update(self, engine, batch, rows, *, objective, denominators, temperature=1.0, keeps_logprobs=False):
        self.updates.append((engine, len(rows), denominators))
        return UpdateResult(1.0, 1e-3, {f"{objective}_loss": (2.0, 4.0)}, skipped=False)


def make_loop(group, rewards=None, warmup_steps=0, minibatch_size=2):
    config = Config()
    config.critic.warmup_steps = warmup_steps
    config.batch.policy_minibatch_size = config.batch.critic_minibatch_size = minibatch_size
    names = ("pool", "collector", "rollout", "evaluator", "saver", "keeper", "process_rewarder", "parity", "watchdog")
    parts = LoopComponents(
        group=group,
        grader=ResponseScorer(config.reward, rewards, str),
        recorder=SimpleNamespace(elapsed_s=0.0),
        stop_after=lambda step: None,
        **dict.fromkeys(names) | {"rollout": SimpleNamespace(weights_changed=lambda: None)},
    )
    return TrainingLoop(config, parts)


def state_of(trajectories=(), **made):
    """A step's state in which some stages have run."""
    state = StepState(list(trajectories), batch_of([[1]]))
    for name, product in made.items():
        setattr(state, name, product)
    return state


def batch_of(masks):
    lengths = torch.tensor([len(mask) for mask in masks])
    mask = torch.tensor([bit for row in masks for bit in row], dtype=torch.bool)
    zeros = torch.zeros(len(mask))
    return PackedBatch(zeros.long(), cu_seqlens_of(lengths), {"mask": mask, "returns": zeros, "old_values": zeros})


def test_a_step_without_finished_responses_steps_the_policy_and_leaves_the_critic_alone():
    group = RecordingGroup()
    loop = make_loop(group)
    loop._states[0] = state_of(policy_batch=batch_of([[0, 1], [1, 1]]), critic_batch=None)
    loop.update_policy(0)
    loop.update_critic(0)
    assert [engine for engine, _, _ in group.updates] == ["policy"]
    assert not any(name.startswith("critic/") for name in loop._states[0].metrics)


def test_the_policy_rests_until_the_critic_is_warm():
    group = RecordingGroup()
    loop = make_loop(group, warmup_steps=2)
    for step in range(3):
        loop._states[step] = state_of(policy_batch=batch_of([[1]]))
        loop.update_policy(step)
    assert len(group.updates) == 1


def test_the_step_whose_update_ends_after_the_limit_is_the_last_one():
    loop, stopped = make_loop(RecordingGroup()), []
    loop._config.run.stop_after_s = 10.0
    for step, elapsed_s in enumerate((4.0, 9.9, 10.0)):
        clock = SimpleNamespace(elapsed_s=elapsed_s)
        loop._parts = replace(loop._parts, recorder=clock, stop_after=stopped.append)
        loop._states[step] = state_of(policy_batch=batch_of([[1]]))
        loop.update_policy(step)
    assert stopped == [2] and [loop._states[step].trained_s for step in range(3)] == [4.0, 9.9, 10.0]


def test_denominators_count_the_whole_minibatch_and_empty_minibatches_take_no_step():
    group = RecordingGroup()
    loop = make_loop(group)
    loop._states[0] = state_of(policy_batch=batch_of([[0, 1, 1], [0, 1]]))
    loop.update_policy(0)
    loop._states[1] = state_of(policy_batch=batch_of([[0, 0], [0]]))
    loop.update_policy(1)
    assert [denominators for _, _, denominators in group.updates] == [{"mask": 3.0, "policy": 3.0}]


def test_every_response_is_in_exactly_one_minibatch():
    group = RecordingGroup()
    loop = make_loop(group, minibatch_size=3)
    loop._states[0] = state_of(critic_batch=batch_of([[1]] * 8))
    loop.update_critic(0)
    assert sum(count for _, count, _ in group.updates) == 8 and len(group.updates) == 3


def test_the_critic_may_learn_in_several_passes_over_the_same_responses():
    group = RecordingGroup()
    loop = make_loop(group, minibatch_size=4)
    loop._config.critic.num_epochs = 3
    loop._states[0] = state_of(critic_batch=batch_of([[1]] * 8))
    loop.update_critic(0)
    assert sum(count for _, count, _ in group.updates) == 24 and len(group.updates) == 6


def test_only_finished_responses_are_scored_and_too_many_failures_stop_the_run():
    def response(id, reason):
        return Trajectory(id, Prompt("p", (1,), answer="2"), 0, 0, 9, [Segment((5,), (-1.0,), 0, reason, 0)])

    asked = []

    async def score_many(items):
        asked.append(items)
        return [Score(None, error="died")] * len(items)

    loop = make_loop(RecordingGroup(), rewards=SimpleNamespace(score_many=score_many))
    done, going_on = response(0, "stop"), response(1, "length")
    loop._states[0] = state_of([done, going_on])
    with pytest.raises(RuntimeError, match="could not be scored"):
        asyncio.run(loop.score(0))
    assert [(i.response, i.answer) for i in asked[0]] == [("[5]", "2")] and going_on.score is None


def make_watched_loop(action, *, compare=None, healthy_checkpoint="step-1", num_rollbacks=0):
    """A loop whose policy's gradient is zero in every step, and what it said, saved and compared."""
    health = HealthConfig(patience_steps=2, gradient=action, parity=action)
    seen = SimpleNamespace(warnings=[], saved=[])
    console = SimpleNamespace(warning=seen.warnings.append)
    saver = SimpleNamespace(
        due=lambda step: True,
        save=lambda step, driver, **rest: seen.saved.append(driver) or "",
        newest_healthy=healthy_checkpoint,
        newest_step=-1,
        num_failed=0,
    )
    published = SimpleNamespace(seconds=0.1, num_bytes=8, buffer_bytes=0)
    rollout = SimpleNamespace(restart_counts=list, trainer_version=1, weight_version=1, publish=lambda: published)
    parts = LoopComponents(
        group=RecordingGroup(),
        pool=SimpleNamespace(
            position=lambda: {"next_id": 7}, release_finished=lambda step: [], snapshot=lambda: lambda: {"next_id": 5}
        ),
        collector=None,
        rollout=rollout,
        grader=None,
        evaluator=None,
        recorder=SimpleNamespace(flush_records=lambda: None, console=console),
        saver=saver,
        keeper=SimpleNamespace(keep_if_due=lambda step, trained_s: None),
        process_rewarder=None,
        stop_after=lambda step: None,
        parity=SimpleNamespace(due=lambda step: compare is not None, compare=compare),
        watchdog=Watchdog(health),
    )
    parts.watchdog.num_rollbacks = num_rollbacks
    loop = TrainingLoop(Config(), parts)
    for step in range(4):
        loop._states[step] = state_of(policy_batch=batch_of([[1]]))
        loop._states[step].metrics |= {"policy/num_updates": 1.0, "policy/grad_norm": 0.0}
    return loop, seen


def test_a_dead_policy_is_warned_of_and_its_watchdog_is_in_the_checkpoint():
    loop, seen = make_watched_loop(HealthAction.warn)
    for step in range(4):
        loop.checkpoint(step)
    assert len(seen.warnings) == 2 and "the gradient of the policy is zero" in seen.warnings[0]
    assert loop._states[3].metrics["health/num_signs"] == 1
    assert [driver["watchdog"]["num_steps"]["gradient"] for driver in seen.saved] == [1, 2, 3, 4]
    assert seen.saved[0]["pool"] == {"next_id": 5}


@pytest.mark.parametrize(("action", "raised"), [(HealthAction.stop, TrainingCollapsed), (HealthAction.roll_back, Rollback)])
def test_a_dead_policy_that_ends_the_run_is_not_saved(action, raised):
    loop, seen = make_watched_loop(action)
    loop.checkpoint(0)
    with pytest.raises(raised, match="the gradient of the policy is zero") as caught:
        loop.checkpoint(1)
    assert len(seen.saved) == 1 and not seen.warnings
    if raised is Rollback:
        assert (caught.value.position, caught.value.number) == ({"next_id": 7}, 1)
    else:
        assert "last good checkpoint is step-1" in str(caught.value)


@pytest.mark.parametrize(
    ("state", "words"),
    [({"healthy_checkpoint": None}, "No good checkpoint"), ({"num_rollbacks": 2}, "Already rolled back 2 times")],
)
def test_a_run_that_cannot_go_back_any_more_stops(state, words):
    loop, _ = make_watched_loop(HealthAction.roll_back, **state)
    loop.checkpoint(0)
    with pytest.raises(TrainingCollapsed, match=words):
        loop.checkpoint(1)


@pytest.mark.parametrize("action", [HealthAction.ignore, HealthAction.warn, HealthAction.stop])
def test_a_comparison_that_fails_during_the_run_does_what_the_configuration_says(action):
    def differ():
        raise EngineMismatch("they differ")

    loop, seen = make_watched_loop(action, compare=differ)
    if action is HealthAction.stop:
        with pytest.raises(TrainingCollapsed, match="they differ"):
            loop.publish(0)
    else:
        loop.publish(0)
        assert seen.warnings == (["they differ"] if action is HealthAction.warn else [])


def test_engines_that_agree_during_the_run_leave_their_difference_in_the_metrics():
    parity = Parity(MismatchStats(mean=1e-7, k3=1e-13, outliers=0.0, max=1e-6), MismatchStats(1.0, 1.0, 1.0, 1.0), 40)
    loop, _ = make_watched_loop(HealthAction.stop, compare=lambda: parity)
    loop.publish(0)
    found = loop._states[0].metrics
    assert {name: found[f"mismatch/parity_{name}"] for name in vars(parity.figures)} == vars(parity.figures)


def test_engines_that_differ_leave_their_figures_in_the_metrics_too():
    parity = Parity(MismatchStats(mean=0.4, k3=0.3, outliers=0.2, max=3.0), MismatchStats(0.1, 0.1, 0.1, 1.0), 40)

    def differ():
        raise EngineMismatch("they differ", parity)

    loop, seen = make_watched_loop(HealthAction.warn, compare=differ)
    loop.publish(0)
    assert seen.warnings and loop._states[0].metrics["mismatch/parity_outliers"] == 0.2


def ids(trajectories):
    return [t.id for t in trajectories]


def test_only_what_grew_and_trains_is_a_row_of_the_trainers_batches_and_all_of_it_is_scored():
    """A response aborted before its first new token waits; a greedy one is scored as a baseline; both fill slots."""

    def response(id, step, *, greedy=False):
        segments = [Segment((5,), (-1.0,), 0, "length", 0)]
        if step:
            segments.append(Segment((5, 6), (-1.0, -1.0), 0, "stop", step))
        return Trajectory(id, Prompt("p", (1,), answer="2"), id, 0, 9, segments, greedy=greedy)

    slots = [response(0, 1), response(1, 0), response(2, 1, greedy=True), response(3, 1)]

    async def collect(step):
        return slots, {}

    async def score_many(items):
        return [Score(float(len(items)))] * len(items)

    loop = make_loop(RecordingGroup(), SimpleNamespace(score_many=score_many))
    noted = {}
    recorder = SimpleNamespace(log_stage_facts=lambda stage, step, **facts: noted.update({(stage, step): facts}))
    collector = SimpleNamespace(collect=collect, rounds=[{"rows": 4}])
    loop._parts = replace(loop._parts, collector=collector, recorder=recorder)
    asyncio.run(loop.generate(1))
    assert noted["generate", 1]["rounds"] == [{"rows": 4}] and noted["generate", 1]["cpu_s"] >= 0
    state = loop._states[1]
    assert ids(state.trajectories) == [0, 3] and state.batch.num_sequences == 2 and ids(state.slots) == ids(slots)
    asyncio.run(loop.score(1))
    assert [t.id for t in state.finished] == [0, 3] and slots[2].reward == 3.0 and slots[1].score is None


def test_responses_that_train_at_their_end_are_the_rows_of_the_step_in_which_they_ended():
    def response(id, *windows, stopped):
        segments = [
            Segment((5,) * n, (-1.0,) * n, 0, "stop" if stopped and k + 1 == len(windows) else "length", k)
            for k, n in enumerate(windows)
        ]
        return Trajectory(id, Prompt("p", (1,), answer="2"), id, 0, 9, segments)

    slots = [response(0, 2, 3, stopped=True), response(1, 2, 3, stopped=False)]

    async def collect(step):
        return slots, {}

    loop = make_loop(RecordingGroup())
    loop._config.schedule.policy_trains_on = TrainsOn.responses
    loop._config.algorithm.correction.old_policy = OldPolicy.rollout
    collector = SimpleNamespace(collect=collect, rounds=[])
    recorder = SimpleNamespace(elapsed_s=0.0, log_stage_facts=lambda *stage, **facts: None)
    loop._parts = replace(loop._parts, collector=collector, recorder=recorder)
    asyncio.run(loop.generate(1))
    state = loop._states[1]
    assert ids(state.trajectories) == [0] and ids(state.slots) == ids(slots)
    assert state.batch.fields["mask"].tolist() == [False] + [True] * 5
    loop.old_logprobs(1)
    assert state.old_logprobs.tolist() == [0.0] + [-1.0] * 5
    slots[0].segments.pop()
    asyncio.run(loop.generate(2))
    assert loop._states[2].batch.num_sequences == 0


def test_an_empty_batch_is_answered_without_asking_the_ranks():
    group, empty = object.__new__(TrainerGroup), window_batch([], None)
    assert len(group.logprobs(empty, temperature=1.0)) == 0
    assert [len(found) for found in group.values(empty)] == [0, 0]
