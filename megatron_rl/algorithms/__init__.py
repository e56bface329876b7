"""The algorithms as pure functions over packed tensors: advantages, losses, KL, corrections, preferences, diagnostics.

The package depends on torch and numpy alone: no model, no engine, no process group. Sequences are packed: concatenated
in 1-D tensors and delimited by ``cu_seqlens`` [N+1]. Results that are reduced over micro-batches or ranks are returned
as sums and denominators.
"""

from megatron_rl.algorithms.advantages import egae, gae, length_adaptive_lambda, monte_carlo_returns
from megatron_rl.algorithms.aggregation import loss_denominator, token_coefficients
from megatron_rl.algorithms.corrections import (
    Correction,
    importance_weights,
    mismatch_correction,
    off_policy_sequence_mask,
)
from megatron_rl.algorithms.critic_free_advantages import group_advantages, reinforce_pp_advantages, rloo_advantages
from megatron_rl.algorithms.diagnostics import value_by_position
from megatron_rl.algorithms.dppo import dppo_kl_loss, dppo_tv_loss
from megatron_rl.algorithms.gmpo import gmpo_loss
from megatron_rl.algorithms.kl import AdaptiveKlController, kl_estimate, kl_loss, kl_penalized_rewards
from megatron_rl.algorithms.loss import Loss
from megatron_rl.algorithms.mismatch import mismatch_metrics
from megatron_rl.algorithms.normalize import boundary_mask, normalize_advantages
from megatron_rl.algorithms.overlong import soft_overlong_penalty
from megatron_rl.algorithms.pass_at_k import mean_and_error, pass_at_k
from megatron_rl.algorithms.policy_loss import cispo_loss, gspo_loss, lm_loss, policy_loss
from megatron_rl.algorithms.preference_losses import (
    bradley_terry_coefficients,
    bradley_terry_loss,
    pairwise_score,
    swap_consistency,
)
from megatron_rl.algorithms.remax import remax_advantages
from megatron_rl.algorithms.sapo import sapo_loss
from megatron_rl.algorithms.turns import role_normalize
from megatron_rl.algorithms.value_loss import (
    explained_variance,
    explained_variance_of,
    explained_variance_stats,
    value_loss,
)

__all__ = [
    "AdaptiveKlController",
    "Correction",
    "Loss",
    "boundary_mask",
    "bradley_terry_coefficients",
    "bradley_terry_loss",
    "cispo_loss",
    "dppo_kl_loss",
    "dppo_tv_loss",
    "egae",
    "explained_variance",
    "explained_variance_of",
    "explained_variance_stats",
    "gae",
    "gmpo_loss",
    "group_advantages",
    "gspo_loss",
    "importance_weights",
    "kl_estimate",
    "kl_loss",
    "kl_penalized_rewards",
    "length_adaptive_lambda",
    "lm_loss",
    "loss_denominator",
    "mean_and_error",
    "mismatch_correction",
    "mismatch_metrics",
    "monte_carlo_returns",
    "normalize_advantages",
    "off_policy_sequence_mask",
    "pairwise_score",
    "pass_at_k",
    "policy_loss",
    "reinforce_pp_advantages",
    "remax_advantages",
    "rloo_advantages",
    "role_normalize",
    "sapo_loss",
    "soft_overlong_penalty",
    "swap_consistency",
    "token_coefficients",
    "value_by_position",
    "value_loss",
]
