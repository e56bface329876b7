"""Which updates a step takes: the laws of T-PPO (arXiv 2506.15050) that the loop itself keeps."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config.schema import Config
from megatron_rl.data.batch import PackedBatch, cu_seqlens_of
from megatron_rl.data.trajectory import Prompt, Score, Segment, Trajectory
from megatron_rl.step.grading import Grader
from megatron_rl.step.loop import Parts, TrainingLoop
from megatron_rl.step.state import StepState
from megatron_rl.training.engine import UpdateResult


class RecordingGroup:
    """Stands in for the trainer ranks: remembers the updates it was asked for."""

    def __init__(self):
        self.updates = []

    def update(self, engine, batch, *, objective, denominators, temperature=1.0):
        self.updates.append((engine, batch.num_sequences, denominators))
        return UpdateResult(1.0, 1e-3, {f"{objective}_loss": (2.0, 4.0)}, skipped=False)


def make_loop(group, rewards=None, warmup_steps=0, minibatch_size=2):
    config = Config()
    config.critic.warmup_steps = warmup_steps
    config.batch.policy_minibatch_size = config.batch.critic_minibatch_size = minibatch_size
    unused = dict.fromkeys(("pool", "collector", "rollout", "evaluator", "recorder", "saver"))
    grader = Grader(config.reward, rewards, str)
    return TrainingLoop(
        config, Parts(group=group, grader=grader, process_rewarder=None, stop_after=lambda step: None, **unused)
    )


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
