"""The algorithms as pure functions over packed tensors: advantages, losses, normalisation, mismatch diagnostics.

Only torch in here: no model, no engine, no process group. Sequences lie back to back in 1-D tensors; ``cu_seqlens``
[N+1] says where each starts. Whatever is reduced over micro-batches or ranks comes as sums and denominators.
"""

from megatron_rl.algorithms.advantages import (
    egae,
    gae,
    group_advantages,
    length_adaptive_lambda,
    monte_carlo_returns,
    soft_overlong_penalty,
)
from megatron_rl.algorithms.loss import Loss
from megatron_rl.algorithms.mismatch import mismatch_metrics
from megatron_rl.algorithms.normalize import boundary_mask, normalize_advantages
from megatron_rl.algorithms.policy_loss import lm_loss, policy_loss
from megatron_rl.algorithms.value_loss import (
    explained_variance,
    explained_variance_of,
    explained_variance_stats,
    value_loss,
)

__all__ = [
    "Loss",
    "boundary_mask",
    "egae",
    "explained_variance",
    "explained_variance_of",
    "explained_variance_stats",
    "gae",
    "group_advantages",
    "length_adaptive_lambda",
    "lm_loss",
    "mismatch_metrics",
    "monte_carlo_returns",
    "normalize_advantages",
    "policy_loss",
    "soft_overlong_penalty",
    "value_loss",
]
