"""How far the rollout engine's policy (mu) is from the trainer's (pi_old) on the same tokens.

Sign convention, everywhere: ``log rho = log pi_old - log mu``, and the tokens were drawn from mu. So the mean of
``-log rho`` estimates KL(mu || pi_old), and so does k3, the mean of ``rho - 1 - log rho``. Equal policies give
kl = k3 = 0, ratio 1, effective sample size 1, chi^2 = 0.
"""

import torch
from torch import Tensor

from megatron_rl.algorithms.checks import check_cu_seqlens, check_float_vector, check_mask, check_same_kind
from megatron_rl.algorithms.loss import keep

MAX_LOG_RATIO = 20.0
"""Guard against overflow, as in the public correction code: log rho is clamped to +- this, before any statistic."""

EQUAL_POLICIES = {
    "kl": 0.0,
    "k3": 0.0,
    "max_abs_log_ratio": 0.0,
    "ppl_ratio": 1.0,
    "ess": 1.0,
    "chi2_token": 0.0,
    "chi2_sequence": 0.0,
}


@torch.no_grad()
def mismatch_metrics(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor
) -> dict[str, float]:
    """Diagnostics of the mismatch, to be logged whether or not it is corrected for. Waits for the device.

    Args:
        old_logprobs: [T] float32 or float64: the trainer's, before the update.
        rollout_logprobs: [T] same dtype and device: the engine's, at sampling.
        mask: [T] 0/1 of any real dtype: the tokens that were sampled.
        cu_seqlens: [N+1] int32 or int64.

    Returns:
        kl: estimate of KL(mu || pi_old) a token, k1: mean of -log rho.
        k3: the same by mean of rho - 1 - log rho; never negative.
        max_abs_log_ratio: largest |log rho|.
        ppl_ratio: the trainer's perplexity over the engine's, exp(mean of -log rho in a sequence), mean over sequences.
        ess: effective sample size as a share, 1 / E[(rho / E rho)^2] over tokens.
        chi2_token: E[rho^2] - 1 over tokens.
        chi2_sequence: E[(product of rho)^2] - 1 over sequences; the log of the product is clamped like log rho.
        With nothing in the mask: the numbers of equal policies.
    """
    check_float_vector("old_logprobs", old_logprobs)
    check_same_kind("rollout_logprobs", rollout_logprobs, "old_logprobs", old_logprobs)
    check_mask(mask, "old_logprobs", old_logprobs)
    bounds = check_cu_seqlens(cu_seqlens, len(old_logprobs)).to(old_logprobs.device)
    inside = mask != 0
    if not bool(inside.any()):
        return dict(EQUAL_POLICIES)
    log_rho = (keep(old_logprobs, mask).double() - keep(rollout_logprobs, mask).double()).clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )
    tokens = log_rho[inside]
    rho = tokens.exp()

    num_sequences = len(bounds) - 1
    sequence_of = torch.repeat_interleave(torch.arange(num_sequences, device=bounds.device), bounds.diff())
    zeros = log_rho.new_zeros(num_sequences)
    counts = zeros.index_add(0, sequence_of, inside.double())
    sums = zeros.index_add(0, sequence_of, log_rho)[counts > 0]
    means = sums / counts[counts > 0]
    metrics = {
        "kl": -tokens.mean(),
        "k3": (torch.expm1(tokens) - tokens).mean(),
        "max_abs_log_ratio": tokens.abs().max(),
        "ppl_ratio": (-means).exp().mean(),
        "ess": rho.mean().square() / rho.square().mean(),
        "chi2_token": rho.square().mean() - 1.0,
        "chi2_sequence": (2.0 * sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp().mean() - 1.0,
    }
    return {name: float(value) for name, value in metrics.items()}
