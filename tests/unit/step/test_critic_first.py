"""SAO's step (arXiv 2607.07508): the critic first, its values read again, credit over generated tokens, one response per prompt."""

import pytest
import torch

from megatron_rl.config.load import load_config
from megatron_rl.data.batch import PackedBatch
from megatron_rl.data.trajectory import Prompt, Score, Segment, Trajectory, message_segment
from megatron_rl.step.kl_penalty import KlPenalty
from megatron_rl.step.loss_batches import response_batch, store_model_outputs
from megatron_rl.step.packing import window_batch
from megatron_rl.step.scoring import ResponseScorer
from megatron_rl.step.state import StepState
from megatron_rl.step.updates import CriticWarmup
from megatron_rl.step.window_advantages import SINGLE_RESPONSE, ModelOutputs, window_advantages
from megatron_rl.training.engine import UpdateResult
from tests.unit.step.stage_runs import run_stage

SAO = load_config(None, ["preset=sao"])
VALUES = torch.tensor([0.2, 0.4, 9.0, -9.0, 0.5, 0.6])
"""Values of two generated tokens, an observation of two tokens, and two generated tokens."""


def episode(*, ends_on_observation: bool = False, reward: float = 1.0) -> Trajectory:
    segments = [
        Segment((5, 6), (-0.5, -0.5), 0, "stop", 0),
        message_segment((8, 8), weight_version=0, step=0, turn=1),
        Segment((5, 6), (-0.5, -0.5), 0, "stop", 0, turn=2),
    ]
    if ends_on_observation:
        segments.append(message_segment((8, 8, 8), weight_version=0, step=0, turn=3))
    prompt, score = Prompt("p", (1,)), Score(reward)
    return Trajectory(0, prompt, 0, 0, 100, segments, score=score, dialogue=True, env_done=True)


def advantages_of(trajectory: Trajectory, values: torch.Tensor, algorithm=SAO.algorithm) -> torch.Tensor:
    batch = window_batch([trajectory], 0)
    everywhere = torch.full((len(batch.tokens),), 77.0)
    everywhere[1 : 1 + len(values)] = values
    signals = ModelOutputs(everywhere, torch.zeros(1))
    return window_advantages([trajectory], batch, signals, step=0, window_tokens=100, algorithm=algorithm).advantages[1:]


def test_advantages_skip_observations_with_a_lambda_of_the_generated_tokens():
    """Four generated tokens: lambda 1 - 1/(1.5 * 4); the values and rewards at observations change nothing."""
    found = advantages_of(episode(), VALUES)
    assert found.tolist() == pytest.approx([0.5842593, 0.4611111, 0, 0, 0.4333333, 0.4])
    other = torch.where(torch.tensor([1, 1, 0, 0, 1, 1]).bool(), VALUES, 1234.5)
    assert torch.equal(advantages_of(episode(), other), found)


def test_a_reward_on_a_trailing_observation_lands_on_the_last_generated_token():
    trajectory = episode(ends_on_observation=True)
    found = advantages_of(trajectory, VALUES)
    assert torch.equal(found[:6], advantages_of(episode(), VALUES)) and found[6:].tolist() == [0.0] * 3
    batch = window_batch([trajectory], 0)
    store_model_outputs([trajectory], batch, ModelOutputs(torch.zeros(len(batch.tokens)), torch.zeros(1)), 0)
    critic = response_batch([trajectory], SAO.algorithm)
    assert critic.fields["returns"][1:].tolist() == [1, 1, 0, 0, 1, 1, 0, 0, 0]
    assert critic.fields["mask"][1:].tolist() == [True, True, False, False, True, True, False, False, False]


def test_lambda_has_no_floor():
    one = Trajectory(0, Prompt("p", (1,)), 0, 0, 100, [Segment((5, 6), (-0.5, -0.5), 0, "stop", 0)], score=Score(1.0))
    # lambda 2/3: A_1 = 0.4 - 0.2 + (2/3) 0.6
    assert advantages_of(one, torch.tensor([0.2, 0.4])).tolist() == pytest.approx([0.6, 0.6])


class ScalarCritic:
    """A critic of one number V, trained by SGD of 0.1 on (V - 1)^2; it counts the passes for values."""

    def __init__(self) -> None:
        self.value, self.num_passes, self.policy_advantages = 0.2, 0, []

    def values(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_passes += 1
        return torch.full((len(batch.tokens),), self.value), torch.full((batch.num_sequences,), self.value)

    def update(self, engine: str, batch: PackedBatch, rows, **_) -> UpdateResult:
        if engine == "critic":
            self.value -= 0.1 * 2 * (self.value - 1.0)
        else:
            self.policy_advantages = batch.fields["advantages"][batch.fields["mask"]].tolist()
        return UpdateResult(1.0, 0.1, {}, skipped=False, plan={})


def run_step(group: ScalarCritic, *, reads_again: bool, warmup_steps: int = 0) -> StepState:
    config = load_config(None, ["preset=sao", f"critic.warmup_steps={warmup_steps}", "algorithm.policy_loss=clip"])
    trajectory = Trajectory(0, Prompt("p", (1,)), 0, 0, 100, [Segment((5,), (-0.5,), 0, "stop", 0)], score=Score(1.0))
    state = StepState([trajectory], window_batch([trajectory], 0))
    state.finished = [trajectory]
    state.old_logprobs = state.batch.fields["rollout_logprobs"]
    nothing = type("", (), {"weights_changed": lambda self: None, "weight_version": 0, "elapsed_s": 0.0})()
    components = {
        "config": config, "group": group, "warmup": CriticWarmup(config), "kl_penalty": KlPenalty(config.algorithm.kl),
        "rules": SINGLE_RESPONSE, "vision": None, "rollout": nothing, "recorder": nothing, "fleet": None,
        "grader": ResponseScorer(config.reward, None, str),
        "stop_after": lambda step: None, "store_samples": lambda state, step: None,
    }  # fmt: skip
    stages = ["values", "advantages", "update_critic", *["updated_values"] * reads_again, "update_policy"]
    for stage in stages:
        run_stage(stage, 0, state, **components)
    return state


def test_the_policy_trains_on_the_values_of_the_updated_critic():
    """K = 2 updates move V from 0.2 to 0.488, so the advantage of a reward of 1 is 0.512; without reading again it is 0.8."""
    group = ScalarCritic()
    state = run_step(group, reads_again=True)
    assert group.value == pytest.approx(0.488) and group.policy_advantages == pytest.approx([0.512])
    assert state.metrics["advantage/finished_mean"] == pytest.approx(0.512)
    # The critic's targets and its clip are those from before.
    assert state.critic_batch.fields["old_values"].tolist()[1] == pytest.approx(0.2)
    stale = ScalarCritic()
    run_step(stale, reads_again=False)
    assert stale.policy_advantages == pytest.approx([0.8])


def test_values_are_not_read_again_while_the_policy_rests():
    group = ScalarCritic()
    run_step(group, reads_again=True, warmup_steps=3)
    assert group.num_passes == 1 and group.policy_advantages == []
