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
from megatron_rl.algorithms.critic_free_advantages import (
    group_advantages,
    reinforce_pp_advantages,
    remax_advantages,
    rloo_advantages,
)
from megatron_rl.algorithms.dis import dis_loss
from megatron_rl.algorithms.dppo import dppo_kl_loss, dppo_tv_loss
from megatron_rl.algorithms.gmpo import gmpo_loss
from megatron_rl.algorithms.kl import AdaptiveKlController, kl_estimate, kl_loss, kl_penalized_rewards, top_k_kl
from megatron_rl.algorithms.loss import Loss
from megatron_rl.algorithms.m2po import m2po_kept, m2po_loss
from megatron_rl.algorithms.mismatch import mismatch_metrics
from megatron_rl.algorithms.normalize import boundary_mask, normalize_advantages, role_normalize
from megatron_rl.algorithms.overlong import soft_overlong_penalty
from megatron_rl.algorithms.pass_at_k import mean_and_error, pass_at_k
from megatron_rl.algorithms.policy_loss import cispo_loss, gspo_loss, lm_loss, policy_loss
from megatron_rl.algorithms.preference_losses import (
    bradley_terry_coefficients,
    bradley_terry_loss,
    dpo_coefficients,
    dpo_loss,
    pairwise_score,
    swap_consistency,
)
from megatron_rl.algorithms.sapo import sapo_loss
from megatron_rl.algorithms.value_loss import (
    explained_variance,
    explained_variance_of,
    explained_variance_stats,
    value_by_position,
    value_loss,
)
