"""Effective values of the presets for rewards of any range equal the papers' values."""

import pytest
import torch

from megatron_rl.algorithms import group_advantages, value_loss
from megatron_rl.config.load import load_config, preset_names
from megatron_rl.config.schema import Mode
from megatron_rl.data.trajectory import Prompt, Score, Segment, Trajectory
from megatron_rl.rewards.registry import resolve
from megatron_rl.step.driver import pretraining_config
from megatron_rl.step.packing import window_batch
from megatron_rl.step.window_advantages import ModelOutputs, window_advantages

# Advantages of a right response of n tokens among 7 right and 8 wrong short ones, with rewards of -1 and 1, the penalty
# of DAPO's equation 13 and the sample's standard deviation.
DAPO = {16384: 0.968246, 17408: 0.751755, 18432: 0.527148, 19456: 0.296605, 20480: 0.062631}


def response(id, num_tokens, score, budget):
    reason = "length" if num_tokens == budget else "stop"
    segment = Segment((7,) * num_tokens, (-0.5,) * num_tokens, 0, reason, 0)
    return Trajectory(id, Prompt("p", (1,)), 0, id, budget, [segment], score=Score(score))


@pytest.mark.parametrize(("length", "expected"), DAPO.items())
def test_the_dapo_preset_gives_a_long_right_response_the_papers_advantage(length, expected):
    config = load_config(None, ["preset=dapo"])
    low, high = resolve("math").value_range({})
    budget = config.batch.max_response_tokens
    lengths, scores = [length, *[10] * 15], [high] * 8 + [low] * 8
    group = [response(i, n, score, budget) for i, (n, score) in enumerate(zip(lengths, scores))]
    batch = window_batch(group, 0)
    found = window_advantages(group, batch, ModelOutputs(), step=0, window_tokens=budget, algorithm=config.algorithm)
    assert float(found.advantages[1]) == pytest.approx(expected, abs=1e-5)
    paper = torch.tensor([1.0] * 8 + [-1.0] * 8, dtype=torch.float64)
    paper[0] += min(0.0, (budget - 4096 - length) / 4096)
    assert float(group_advantages(paper, torch.zeros(16, dtype=torch.int64))[0]) == pytest.approx(expected, abs=1e-6)


def test_the_value_clip_of_tppo_is_the_ports_in_shares_of_the_rewards_range():
    """Half the range, half the clip: a quarter of the port's loss on every token, and the same tokens clipped."""
    algorithm = load_config(None, ["preset=tppo"]).algorithm
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (2 * torch.rand(3, 200, generator=generator) - 1).double()
    mask = torch.ones(200)
    port = value_loss(values, old, returns, mask, clip_low=0.5, clip_high=0.6)
    ours = value_loss(
        *((x + 1) / 2 for x in (values, old, returns)),
        mask,
        clip_low=algorithm.value_clip_low,
        clip_high=algorithm.value_clip_high,
    )
    assert ours.sum.item() == pytest.approx(port.sum.item() / 4)
    assert ours.metrics["clip_fraction"][0] == port.metrics["clip_fraction"][0] > 0


def test_bounds_of_the_ports_and_nothing_of_it_in_other_papers_presets():
    for name in preset_names():
        algorithm = load_config(None, [f"preset={name}"]).algorithm
        of_tppo = name in ("tppo", "ppo", "partial_rollout_ppo")
        assert (algorithm.advantage_clamp, algorithm.dual_clip) == ((10.0, 10.0) if of_tppo else (0.0, 0.0)), name


@pytest.mark.parametrize("preset", ["vapo", "dapo", "tppo", "ppo"])
def test_learning_rates_warm_up_where_the_papers_or_their_code_do(preset):
    config = load_config(None, [f"preset={preset}"])
    assert config.policy.optimizer.warmup_steps > 0
    assert preset == "dapo" or config.critic.optimizer.warmup_steps > 0


def test_value_pretraining_sees_the_policys_responses_as_they_come():
    """No mixed groups alone, no quick ones alone, no windows; the frozen policy is evaluated by nobody."""
    overrides = [
        "preset=vapo",
        "algorithm.dynamic_sampling.enabled=true",
        "rollout.over_sampling=1.5",
        "schedule.mode=tppo",
        "batch.window_tokens=8192",
        "eval.every_steps=3",
    ]
    config = pretraining_config(load_config(None, overrides))
    assert not config.algorithm.dynamic_sampling.enabled and config.rollout.over_sampling == 1.0
    assert config.schedule.mode is Mode.sync and config.batch.window_tokens == 0 and config.eval.every_steps == 0
    assert config.run.num_steps == 50 and config.critic.optimizer.lr == 2.0e-6
