"""The functions of the stages: which updates a step takes (the laws of T-PPO, arXiv 2506.15050), and which responses train."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config.schedule_facts import facts_of
from megatron_rl.config.schema import Config, OldPolicy
from megatron_rl.data.batch import PackedBatch, cu_seqlens_of
from megatron_rl.data.trajectory import Prompt, Score, Segment, Trajectory
from megatron_rl.step.collect import ChildCpuClock
from megatron_rl.step.kl_penalty import KlPenalty
from megatron_rl.step.packing import window_batch
from megatron_rl.step.scoring import ResponseScorer
from megatron_rl.step.state import StepState
from megatron_rl.step.updates import CriticWarmup
from megatron_rl.training.engine import UpdateResult
from megatron_rl.training.trainer_group import TrainerGroup
from tests.unit.step.stage_runs import run_stage


class RecordingGroup:
    """Stands in for the trainer ranks: remembers the updates it was asked for."""

    def __init__(self):
        self.updates = []

    def update(self, engine, batch, rows, *, objective, denominators, temperature=1.0, keeps_logprobs=False):
        self.updates.append((engine, len(rows), denominators))
        return UpdateResult(1.0, 1e-3, {f"{objective}_loss": (2.0, 4.0)}, skipped=False)


def components(group, *, rewards=None, warmup_steps=0, minibatch_size=2, **other):
    config = Config()
    config.critic.warmup_steps = warmup_steps
    config.batch.policy_minibatch_size = config.batch.critic_minibatch_size = minibatch_size
    return {
        "config": config,
        "group": group,
        "grader": ResponseScorer(config.reward, rewards, str),
        "kl_penalty": KlPenalty(config.algorithm.kl),
        "warmup": CriticWarmup(config),
        "rollout": SimpleNamespace(weights_changed=lambda: None),
        "recorder": SimpleNamespace(elapsed_s=0.0),
        "stop_after": lambda step: None,
        "store_samples": lambda state, step: None,
        "fleet": None,
        "vision": None,
        "children": ChildCpuClock(),
        **other,
    }


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
    run, state = components(group), state_of(policy_batch=batch_of([[0, 1], [1, 1]]), critic_batch=None)
    run_stage("update_policy", 0, state, **run)
    run_stage("update_critic", 0, state, **run)
    assert [engine for engine, _, _ in group.updates] == ["policy"]
    assert not any(name.startswith("critic/") for name in state.metrics)


def test_the_policy_rests_until_the_critic_is_warm():
    group = RecordingGroup()
    run = components(group, warmup_steps=2)
    for step in range(3):
        run_stage("update_policy", step, state_of(policy_batch=batch_of([[1]])), **run)
    assert len(group.updates) == 1


def test_the_step_whose_update_ends_after_the_limit_is_the_last_one():
    stopped, trained_s = [], []
    run = components(RecordingGroup(), stop_after=stopped.append)
    run["config"].run.stop_after_s = 10.0
    for step, elapsed_s in enumerate((4.0, 9.9, 10.0)):
        state = state_of(policy_batch=batch_of([[1]]))
        run_stage("update_policy", step, state, **run | {"recorder": SimpleNamespace(elapsed_s=elapsed_s)})
        trained_s.append(state.trained_s)
    assert stopped == [2] and trained_s == [4.0, 9.9, 10.0]


def test_denominators_count_the_whole_minibatch_and_empty_minibatches_take_no_step():
    group = RecordingGroup()
    run = components(group)
    run_stage("update_policy", 0, state_of(policy_batch=batch_of([[0, 1, 1], [0, 1]])), **run)
    run_stage("update_policy", 1, state_of(policy_batch=batch_of([[0, 0], [0]])), **run)
    assert [denominators for _, _, denominators in group.updates] == [{"mask": 3.0, "policy": 3.0}]


def test_every_response_is_in_exactly_one_minibatch():
    group = RecordingGroup()
    run_stage("update_critic", 0, state_of(critic_batch=batch_of([[1]] * 8)), **components(group, minibatch_size=3))
    assert sum(count for _, count, _ in group.updates) == 8 and len(group.updates) == 3


def test_the_critic_may_learn_in_several_passes_over_the_same_responses():
    group = RecordingGroup()
    run = components(group, minibatch_size=4)
    run["config"].critic.num_epochs = 3
    run_stage("update_critic", 0, state_of(critic_batch=batch_of([[1]] * 8)), **run)
    assert sum(count for _, count, _ in group.updates) == 24 and len(group.updates) == 6


def test_only_finished_responses_are_scored_and_too_many_failures_stop_the_run():
    def response(id, reason):
        return Trajectory(id, Prompt("p", (1,), answer="2"), 0, 0, 9, [Segment((5,), (-1.0,), 0, reason, 0)])

    asked = []

    async def score_many(items):
        asked.append(items)
        return [Score(None, error="died")] * len(items)

    run = components(RecordingGroup(), rewards=SimpleNamespace(score_many=score_many))
    done, going_on = response(0, "stop"), response(1, "length")
    with pytest.raises(RuntimeError, match="could not be scored"):
        asyncio.run(run_stage("score", 0, state_of([done, going_on]), **run))
    assert [(i.response, i.answer) for i in asked[0]] == [("[5]", "2")] and going_on.score is None


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

    noted, state = {}, StepState()
    recorder = SimpleNamespace(log_stage_facts=lambda stage, step, **facts: noted.update({(stage, step): facts}))
    collector = SimpleNamespace(collect=collect, rounds=[{"rows": 4}])
    rewards = SimpleNamespace(score_many=score_many)
    run = components(RecordingGroup(), rewards=rewards, collector=collector, recorder=recorder, facts=facts_of(Config()))
    asyncio.run(run_stage("generate", 1, state, **run))
    assert noted["generate", 1]["rounds"] == [{"rows": 4}] and noted["generate", 1]["cpu_s"] >= 0
    assert ids(state.trajectories) == [0, 3] and state.batch.num_sequences == 2 and ids(state.slots) == ids(slots)
    asyncio.run(run_stage("score", 1, state, **run))
    assert [t.id for t in state.finished] == [0, 3] and slots[2].reward == 3.0 and slots[1].score is None


def test_responses_that_train_at_their_end_are_the_rows_of_the_step_in_which_they_ended():
    def response(id, *windows, stopped):
        segments = [
            Segment((5,) * n, (-1.0,) * n, 0, "stop" if stopped and k + 1 == len(windows) else "length", k)
            for k, n in enumerate(windows)
        ]
        return Trajectory(id, Prompt("p", (1,), answer="2"), id, 0, 9, segments, deferred_steps=(0,))

    slots = [response(0, 2, 3, stopped=True), response(1, 2, 3, stopped=False)]

    async def collect(step):
        return slots, {}

    collector = SimpleNamespace(collect=collect, rounds=[])
    recorder = SimpleNamespace(elapsed_s=0.0, log_stage_facts=lambda *stage, **facts: None)
    run, state = components(RecordingGroup(), collector=collector, recorder=recorder), StepState()
    run["config"].schedule.training_window_tokens = 0
    run["config"].algorithm.correction.old_policy = OldPolicy.rollout
    run["facts"] = facts_of(run["config"])
    asyncio.run(run_stage("generate", 1, state, **run))
    assert ids(state.trajectories) == [0] and ids(state.slots) == ids(slots)
    assert state.batch.fields["mask"].tolist() == [False] + [True] * 5
    run_stage("old_logprobs", 1, state, **run)
    assert state.old_logprobs.tolist() == [0.0] + [-1.0] * 5
    assert slots[1].deferred_steps == (0, 1)
    slots.pop(0)
    later = StepState()
    asyncio.run(run_stage("generate", 2, later, **run))
    assert later.batch.num_sequences == 0


def test_a_dialogue_that_ends_without_a_new_token_trains_on_its_untrained_ones():
    talk = Trajectory(0, Prompt("p", (1,)), 0, 0, 9, [Segment((5,) * 3, (-1.0,) * 3, 0, "stop", 0)], dialogue=True)

    async def collect(step):
        talk.env_done = step == 1
        return [talk], {}

    collector = SimpleNamespace(collect=collect, rounds=[])
    recorder = SimpleNamespace(elapsed_s=0.0, log_stage_facts=lambda *stage, **facts: None)
    run, states = components(RecordingGroup(), collector=collector, recorder=recorder), [StepState(), StepState()]
    run["config"].schedule.training_window_tokens = 0
    run["facts"] = facts_of(run["config"])
    for step, state in enumerate(states):
        asyncio.run(run_stage("generate", step, state, **run))
    assert [state.batch.fields["mask"].tolist() for state in states] == [[], [False, True, True, True]]


def test_an_empty_batch_is_answered_without_asking_the_ranks():
    group, empty = object.__new__(TrainerGroup), window_batch([], 0)
    assert len(group.logprobs(empty, temperature=1.0)) == 0
    assert [len(found) for found in group.values(empty)] == [0, 0]
