"""Bounds of the parity check between trainer and servers on the same sampled tokens, by numeric format.

The bounds are measured values with a margin: docs/agreement.md lists both, and ``tools/measure_agreement.py`` measures them.
"""

import math
from dataclasses import replace
from pathlib import Path

from megatron_rl.algorithms.mismatch import MismatchStats
from megatron_rl.config.derived import policy_model
from megatron_rl.config.schema import Config, Dtype, Fp8
from megatron_rl.families.model_facts import as_config, has_experts, is_supported

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
