"""How far the rollout engine's policy (mu) is from the trainer's (pi_old) on the same tokens.

Sign convention, everywhere: ``log rho = log pi_old - log mu``, and the tokens were drawn from mu. So the mean of
``-log rho`` estimates KL(mu || pi_old), and so does k3, the mean of ``rho - 1 - log rho``. Equal policies give
kl = k3 = 0, ratio 1, effective sample size 1, chi^2 = 0.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms.loss import MAX_LOG_RATIO, chosen, keep
from megatron_rl.algorithms.sequences import sequence_index, sequence_sums
from megatron_rl.algorithms.shapes import check_cu_seqlens, check_float_vector, check_mask, check_same_kind

EQUAL_POLICIES = {
    "kl": 0.0,
    "k3": 0.0,
    "max_abs_log_ratio": 0.0,
    "ppl_ratio": 1.0,
    "ess": 1.0,
    "chi2_token": 0.0,
    "chi2_sequence": 0.0,
}


_OUTLIER = math.log(2)
"""Nats: one engine calls the token more than twice as likely as the other."""


@dataclass(frozen=True)
class Figures:
    """How far two engines are apart on the same sampled tokens; all 0 for none."""

    mean: float
    """Of |log rho|, nats."""
    k3: float
    """Mean of rho - 1 - log rho, nats."""
    outliers: float
    """Share of tokens with |log rho| above ln 2."""
    max: float
    """Largest |log rho|, nats."""


def mismatch_figures(log_rho: Tensor) -> Figures:
    """``log_rho`` [K], trainer minus engine. A difference that is not a number counts as infinite."""
    if not len(log_rho):
        return Figures(0.0, 0.0, 0.0, 0.0)
    log_rho = log_rho.double()
    difference = log_rho.abs().nan_to_num(nan=math.inf, posinf=math.inf)
    clamped = log_rho.nan_to_num(nan=MAX_LOG_RATIO).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return Figures(
        mean=float(difference.mean()),
        k3=float((torch.expm1(clamped) - clamped).mean()),
        outliers=float((difference > _OUTLIER).double().mean()),
        max=float(difference.max()),
    )


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
        kl: estimate of KL(mu || pi_old) per token, k1: mean of -log rho.
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
    bounds = check_cu_seqlens(cu_seqlens, len(old_logprobs))
    inside = mask != 0
    if not bool(inside.any()):
        return dict(EQUAL_POLICIES)
    log_rho = (keep(old_logprobs, mask).double() - keep(rollout_logprobs, mask).double()).clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )
    sequence_of = sequence_index(bounds, log_rho.device)
    counts = sequence_sums(inside.double(), sequence_of, len(bounds) - 1)
    return metrics_of_ratios(log_rho, inside, sequence_sums(log_rho, sequence_of, len(bounds) - 1), counts)


def metrics_of_ratios(log_rho: Tensor, inside: Tensor, sums: Tensor, counts: Tensor) -> dict[str, float]:
    """``mismatch_metrics``, of clamped ``log_rho`` [T] float64 with its ``sums`` and ``counts`` [N] over each sequence.

    ``inside`` [T] bool: the tokens that were sampled, one at least; ``log_rho`` is 0 on the others.
    """
    tokens = chosen(log_rho, inside)
    rho = tokens.exp()
    sums = sums[counts > 0]
    means, mean_square = sums / counts[counts > 0], rho.square().mean()
    metrics: dict[str, Tensor | float] = {
        "kl": -tokens.mean(),
        "k3": torch.expm1(tokens).sub_(tokens).mean(),
        "max_abs_log_ratio": torch.stack(tokens.aminmax()).abs().max(),
        "ppl_ratio": (-means).exp().mean(),
        "ess": _effective_share(rho.mean(), mean_square),
        "chi2_token": mean_square - 1.0,
        "chi2_sequence": (2.0 * sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp().mean() - 1.0,
    }
    return {name: float(value) for name, value in metrics.items()}


def effective_sample_size(weights: Tensor) -> float:
    """1 / E[(w / E w)^2] of importance weights [K], a share within (0, 1]; 1 for none, 0 where all are 0."""
    if len(weights) == 0:
        return 1.0
    return _effective_share(weights.mean(), weights.square().mean())


def _effective_share(mean: Tensor, mean_square: Tensor) -> float:
    return float(mean.square()) / float(mean_square) if mean_square > 0 else 0.0
