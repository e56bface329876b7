"""The parity check: sampled tokens must have about the same log-probs in Megatron and SGLang, before and during training.

Four figures are bounded, because no single one detects everything. The mean detects an error in all tokens; outliers and k3
detect an error in a few. The largest difference is useful if trainer and servers compute exactly. The bounds are measured
values with a margin: docs/agreement.md lists both, and ``tools/measure_agreement.py`` measures them.
"""

import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.mismatch import MismatchStats, mismatch_figures
from megatron_rl.config.derived import is_due, policy_model
from megatron_rl.config.schema import Config, Dtype, Fp8, RoutingReplay
from megatron_rl.data.batch import PackedBatch
from megatron_rl.data.trajectory import Prompt, Trajectory
from megatron_rl.data.vision import ImageProcessor
from megatron_rl.errors import UserError
from megatron_rl.families.model_facts import as_config, has_experts, is_supported
from megatron_rl.rollout.service import RolloutService
from megatron_rl.step.packing import window_batch
from megatron_rl.training.trainer_group import TrainerGroup

_MAX_TOKENS = 64
"""Sampled tokens per prompt: enough to reach positions, caches and norms, few enough to start quickly."""
_MUCH_MORE = 10.0
"""Ratio of the mean differences, prompts with images to text prompts, above which the images are reported as the cause."""
_KEYS = {
    "mean": "rollout.parity_bounds.mean",
    "k3": "rollout.parity_bounds.k3",
    "outliers": "rollout.parity_bounds.outliers",
    "max": "rollout.max_logprob_difference",
}


@dataclass(frozen=True)
class Parity:
    """The mismatch of trainer and servers on the sampled tokens, and its bounds."""

    figures: MismatchStats
    bounds: MismatchStats
    """The largest figures that pass; infinite for a figure without a bound."""
    num_tokens: int

    def __str__(self) -> str:
        return ", ".join(self._text(name) for name in _LABELS)

    def too_large(self) -> list[str]:
        """Return the names of the figures beyond their bounds."""
        return [name for name in _LABELS if not getattr(self.figures, name) <= getattr(self.bounds, name)]

    def metrics(self) -> dict[str, float]:
        return {f"mismatch/parity_{name}": value for name, value in vars(self.figures).items()}

    def _text(self, name: str) -> str:
        word, form = _LABELS[name]
        bound = getattr(self.bounds, name)
        return f"{word} {getattr(self.figures, name):{form}}" + ("" if math.isinf(bound) else f" (at most {bound:{form}})")


_LABELS = {"mean": ("mean difference", ".2g"), "k3": ("k3", ".2g"), "outliers": ("beyond ln 2", ".2%"), "max": ("largest", ".2g")}
"""Maps a figure to its label and its number format."""


class EngineMismatch(UserError):
    """Megatron and SGLang disagree about the same tokens."""

    def __init__(self, message: str, parity: Parity | None = None) -> None:
        super().__init__(message)
        self.parity = parity


class ParityCheck:
    """Compares trainer and servers on fresh responses to the first prompts. The servers must have the trainer's weights."""

    def __init__(
        self,
        config: Config,
        prompts: Sequence[Prompt],
        *,
        group: TrainerGroup,
        rollout: RolloutService,
        vision: ImageProcessor | None,
        wait_for: Callable[[Coroutine[Any, Any, Any]], Any],
    ) -> None:
        """``wait_for`` runs a coroutine on the asyncio thread and returns its result."""
        self._config = config
        self._prompts = prompts
        self._group = group
        self._rollout = rollout
        self._vision = vision
        self._wait_for = wait_for

    def due(self, step: int) -> bool:
        """True after every rollout.parity_every_steps steps, if the parity check is enabled."""
        return self.wanted and is_due(step + 1, self._config.rollout.parity_every_steps)

    @property
    def wanted(self) -> bool:
        return self._config.rollout.max_logprob_difference != 0

    def compare(self) -> Parity:
        """Run the check (main thread, collective). The servers are awake before and after. Raises EngineMismatch beyond a bound."""
        rollout, trajectories = self._rollout, sample_for_parity(self._config, self._prompts)
        self._wait_for(rollout.generate(trajectories, step=0, window_tokens=_MAX_TOKENS, kind="parity"))
        # Colocated servers free the memory that the trainer's pass needs.
        rollout.sleep()
        try:
            return compare_logprobs(
                self._config, self._group, trajectories, rollout.differing_weights, self._vision
            )
        finally:
            rollout.wake()


def sample_for_parity(config: Config, prompts: Sequence[Prompt]) -> list[Trajectory]:
    """Return fresh responses to the first prompts; if there are prompts with images, half of the responses are to those."""
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
    vision: ImageProcessor | None = None,
) -> Parity:
    """Compare log-probs; raises EngineMismatch beyond a bound of ``parity_bounds``. ``differing_weights`` is called only then."""
    # Without ids, because these sequences do not belong to a step.
    batch = replace(window_batch(trajectories, 0, vision), ids=())
    mask = batch.fields["mask"]
    ours = group.logprobs(batch, temperature=config.rollout.temperature)[mask]
    theirs = batch.fields["rollout_logprobs"][mask]
    # NaN on either side compares false with everything: count it as infinitely far.
    difference = (ours - theirs).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    bounds = parity_bounds(config, on_gpu=torch.cuda.is_available())
    parity = Parity(mismatch_figures(ours - theirs), bounds, len(difference))
    if not parity.too_large():
        return parity
    worst = int(difference.argmax())
    raise EngineMismatch(
        f"log-probs of {parity.num_tokens} sampled tokens differ between Megatron and SGLang by more than {_computed(config)} "
        f"explains: {parity}; at the worst token Megatron computes {float(ours[worst]):.5f} and SGLang "
        f"{float(theirs[worst]):.5f}. {_worst_prompt(trajectories, batch, difference)}"
        f"{_what_to_check(config, differing_weights(), parity)}",
        parity,
    )


def _computed(config: Config) -> str:
    kind = numeric_format(config, on_gpu=torch.cuda.is_available())
    return f"{kind} of {'a mixture of experts' if has_expert_layers(config) else 'a dense model'}"


def _worst_prompt(trajectories: Sequence[Trajectory], batch: PackedBatch, difference: Tensor) -> str:
    """Name the prompt of the worst token, and add a hint if only prompts with images differ; empty if no prompt has images."""
    with_images = torch.tensor([bool(t.prompt.images) for t in trajectories])
    if not with_images.any():
        return ""
    rows = torch.arange(batch.num_sequences).repeat_interleave(batch.lengths)[batch.fields["mask"]]
    worst = trajectories[int(rows[difference.argmax()])].prompt
    where = f"The worst token is in a response to {worst.source or worst.id} ({len(worst.images)} images). "
    on_images, on_text = difference[with_images[rows]], difference[~with_images[rows]]
    if not len(on_text) or float(on_images.mean()) < _MUCH_MORE * float(on_text.mean()):
        return where
    return (
        f"{where}Only prompts with images differ: look at the vision encoder's weights and the servers' "
        "preprocessor_config.json first. "
    )


def _what_to_check(config: Config, differing: list[str], parity: Parity) -> str:
    if differing:
        return (
            f"The servers have other weights than the trainer: {', '.join(differing[:5])}"
            f"{' and more' if len(differing) > 5 else ''}. Check that the servers were started from the same config.json "
            "and that no other process sends them weights"
        )
    keys = [_KEYS[name] for name in parity.too_large()]
    advice = (
        f"The weights are equal, so the forward passes differ. Check the servers' --dtype against "
        f"policy.dtype={config.policy.dtype.value}, their --enable-fp32-lm-head, rope scaling and attention backend "
        "(megatron-rl doctor compares them). "
    )
    if has_expert_layers(config) and config.policy.moe.routing_replay is not RoutingReplay.R3:
        advice += "policy.moe.routing_replay=R3 makes the trainer follow the servers' choice of experts. "
    return f"{advice}docs/agreement.md lists usual values; if yours are correct for your model, raise {' and '.join(keys)}"


_DENSE = {
    "float32": MismatchStats(mean=math.inf, k3=math.inf, outliers=math.inf, max=1e-4),
    "TF32": MismatchStats(mean=0.01, k3=1e-4, outliers=0.001, max=math.inf),
    "bfloat16": MismatchStats(mean=0.05, k3=3e-3, outliers=0.002, max=math.inf),
    "fp8": MismatchStats(mean=0.4, k3=0.1, outliers=0.1, max=math.inf),
}
"""Maps a numeric format to its bounds. In exact float32 one bound on the largest difference bounds the others."""
_EXPERTS = {
    "float32": _DENSE["float32"],
    "TF32": MismatchStats(mean=0.02, k3=5e-4, outliers=0.003, max=math.inf),
    "bfloat16": MismatchStats(mean=0.08, k3=5e-3, outliers=0.01, max=math.inf),
    "fp8": MismatchStats(mean=0.5, k3=0.15, outliers=0.15, max=math.inf),
}
"""The same for models with experts: a rounding that changes the choice of an expert changes the token's log-prob by much."""


def numeric_format(config: Config, *, on_gpu: bool) -> str:
    """Return float32, TF32 (the precision of float32 products on a GPU with Transformer Engine), bfloat16 or fp8."""
    if config.policy.fp8 is not Fp8.none:
        return "fp8"
    if config.policy.dtype is Dtype.float32:
        return "TF32" if on_gpu else "float32"
    return "bfloat16"


def has_expert_layers(config: Config) -> bool:
    """True if the policy is a mixture of experts; False if there is no model folder yet."""
    if not (Path(config.policy.path) / "config.json").is_file():
        return False
    model = policy_model(config)
    return is_supported(model.get("model_type")) and any(has_experts(as_config(model)))


def parity_bounds(config: Config, *, on_gpu: bool) -> MismatchStats:
    """Return the largest figures that pass. Bounds given in the configuration replace the defaults of its dtype."""
    bounds = (_EXPERTS if has_expert_layers(config) else _DENSE)[numeric_format(config, on_gpu=on_gpu)]
    given = {**vars(config.rollout.parity_bounds), "max": config.rollout.max_logprob_difference}
    return replace(bounds, **{name: value for name, value in given.items() if value is not None})
