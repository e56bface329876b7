"""The same sampled tokens must have the same log-probs in Megatron and in SGLang: before training, and again during it."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config.schema import Config
from megatron_rl.data.batch import PackedBatch
from megatron_rl.data.trajectory import Prompt, Trajectory
from megatron_rl.data.vision import Vision
from megatron_rl.errors import UserError
from megatron_rl.rollout.service import RolloutService
from megatron_rl.step.packing import window_batch
from megatron_rl.training.trainer_group import TrainerGroup

_MAX_TOKENS = 64
"""Sampled tokens per prompt: enough to reach positions, caches and norms, few enough to start quickly."""


class EngineMismatch(UserError):
    """Megatron and SGLang disagree about the same tokens."""


@dataclass(frozen=True)
class Parity:
    """How well the two engines agree: the largest difference of log-probs, in nats, over the sampled tokens."""

    max_difference: float
    num_tokens: int


class ParityCheck:
    """Compares the engines on fresh responses to the first prompts. The servers must hold the trainer's weights."""

    def __init__(
        self,
        config: Config,
        prompts: Sequence[Prompt],
        *,
        group: TrainerGroup,
        rollout: RolloutService,
        vision: Vision | None,
        wait_for: Callable[[Coroutine[Any, Any, Any]], Any],
    ) -> None:
        """``wait_for`` runs a coroutine on the asyncio thread to its end."""
        self._config = config
        self._prompts = prompts
        self._group = group
        self._rollout = rollout
        self._vision = vision
        self._wait_for = wait_for

    def due(self, step: int) -> bool:
        """After every rollout.parity_every_steps steps, if there is a limit."""
        rollout = self._config.rollout
        every = rollout.parity_every_steps
        return bool(rollout.max_logprob_difference and every) and (step + 1) % every == 0

    def compare(self) -> Parity:
        """On the main thread, collective; the servers are awake before and after. EngineMismatch beyond the limit."""
        rollout, trajectories = self._rollout, sample_for_parity(self._config, self._prompts)
        self._wait_for(rollout.generate(trajectories, step=0, window_tokens=_MAX_TOKENS, kind="parity"))
        rollout.sleep()
        try:
            return compare_logprobs(
                self._config, self._group, trajectories, rollout.differing_weights, self._vision
            )
        finally:
            rollout.wake()


def sample_for_parity(config: Config, prompts: Sequence[Prompt]) -> list[Trajectory]:
    """Fresh responses to the first prompts; where there are prompts with images, half of them have images."""
    budget = min(_MAX_TOKENS, config.batch.max_response_tokens)
    number = config.rollout.num_parity_prompts
    with_images = [prompt for prompt in prompts if prompt.images][: (number + 1) // 2]
    text = [prompt for prompt in prompts if not prompt.images][: number - len(with_images)]
    chosen = [*with_images, *text]
    return [
        Trajectory(id=i, prompt=p, group_id=i, sample_index=0, max_response_tokens=budget) for i, p in enumerate(chosen)
    ]


def compare_logprobs(
    config: Config,
    group: TrainerGroup,
    trajectories: Sequence[Trajectory],
    differing_weights: Callable[[], list[str]],
    vision: Vision | None = None,
) -> Parity:
    """Raise EngineMismatch beyond rollout.max_logprob_difference; ``differing_weights`` is asked only then."""
    batch = window_batch(trajectories, 0, vision)
    mask = batch.fields["mask"]
    ours = group.logprobs(batch, temperature=config.rollout.temperature)[mask]
    theirs = batch.fields["rollout_logprobs"][mask]
    difference = (ours - theirs).abs()
    # NaN on either side compares false with everything: count it as infinitely far.
    difference[difference.isnan()] = float("inf")
    worst = int(difference.argmax())
    parity = Parity(float(difference[worst]), len(difference))
    threshold = config.rollout.max_logprob_difference
    if parity.max_difference > threshold:
        raise EngineMismatch(
            f"log-probs of {parity.num_tokens} sampled tokens differ between Megatron and SGLang by up to "
            f"{parity.max_difference:.2e} (mean {float(difference.mean()):.2e}), more than "
            f"rollout.max_logprob_difference={threshold:g}; at the worst token Megatron says {float(ours[worst]):.5f} and "
            f"SGLang {float(theirs[worst]):.5f}. {_whose(trajectories, batch, difference, threshold)}"
            f"{_what_to_check(differing_weights())}"
        )
    return parity


def _whose(trajectories: Sequence[Trajectory], batch: PackedBatch, difference: Tensor, threshold: float) -> str:
    """Which prompt the worst token belongs to, and whether it is the images; empty without images."""
    if not any(t.prompt.images for t in trajectories):
        return ""
    rows = torch.arange(batch.num_sequences).repeat_interleave(batch.lengths)[batch.fields["mask"]]
    worst = trajectories[int(rows[difference.argmax()])].prompt
    bad = {int(row) for row in rows[difference > threshold]}
    num_text = sum(not trajectories[row].prompt.images for row in bad)
    where = f"The worst token answers {worst.source or worst.id} ({len(worst.images)} images). "
    if num_text:
        return where
    return (
        f"{where}Only prompts with images differ: look at the vision encoder's weights and the servers' "
        "preprocessor_config.json first. "
    )


def _what_to_check(differing: list[str]) -> str:
    if differing:
        return (
            f"The servers hold other weights than the trainer: {', '.join(differing[:5])}"
            f"{' and more' if len(differing) > 5 else ''}. Check that the servers were started from the same config.json "
            "and that nobody else sends them weights"
        )
    return (
        "The weights are equal, so the forward passes differ. Check the servers' --dtype against policy.dtype, rope scaling "
        "and attention backend, or raise the threshold for bfloat16 (differences of a few 0.01 are usual)"
    )
