"""How far the rollout engine's policy (mu) is from the trainer's (pi_old) on the same tokens.

Sign convention, everywhere: ``log rho = log pi_old - log mu``, and the tokens were drawn from mu. So the mean of
``-log rho`` estimates KL(mu || pi_old), and so does k3, the mean of ``rho - 1 - log rho``. Equal policies give
kl = k3 = 0, ratio 1, effective sample size 1, chi^2 = 0.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms.loss import MAX_LOG_RATIO, exactly, is_on
from megatron_rl.algorithms.sequences import exact_sums, expm1, sequence_blocks
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
    sums = RatioSums()
    for first, end in sequence_blocks(bounds, mask.device):
        block, borders = slice(int(bounds[first]), int(bounds[end])), bounds[first : end + 1] - bounds[first]
        log_rho = exactly(old_logprobs[block], mask[block]).sub_(exactly(rollout_logprobs[block], mask[block]))
        log_rho.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        sums.add(log_rho, exact_sums(log_rho, borders), exact_sums(is_on(mask[block]), borders))
    return sums.metrics()


class RatioSums:
    """What ``mismatch_metrics`` are made of, in float64; blocks of whole sequences are added one after the other."""

    def __init__(self) -> None:
        self._excess = self._excess_square = self._k3 = self._max = 0.0
        self._sums: list[Tensor] = []
        self._counts: list[Tensor] = []

    def add(self, log_rho: Tensor, sums: Tensor, counts: Tensor) -> None:
        """``log_rho`` [T] float64, clamped, 0 where a token is not counted; ``sums`` and ``counts`` [N] over each sequence."""
        if not len(log_rho):
            return
        excess = expm1(log_rho)  # rho - 1, which is 0 where a token is not counted
        self._excess += float(excess.sum())
        self._excess_square += float(excess.square().sum())
        self._k3 += float(excess.sub_(log_rho).sum())
        self._max = max(self._max, float(log_rho.amax()), -float(log_rho.amin()))
        self._sums.append(sums)
        self._counts.append(counts)

    def counts(self) -> Tensor:
        """Counted tokens of each sequence that has any, float64."""
        return _filled(self._counts, self._counts)

    def metrics(self) -> dict[str, float]:
        counts, sums = self.counts(), _filled(self._sums, self._counts)
        if not len(counts):
            return dict(EQUAL_POLICIES)
        num_tokens = float(counts.sum())
        excess, excess_square = self._excess / num_tokens, self._excess_square / num_tokens
        chi2, products = 2.0 * excess + excess_square, sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return {
            "kl": -float(sums.sum()) / num_tokens,
            "k3": self._k3 / num_tokens,
            "max_abs_log_ratio": self._max,
            "ppl_ratio": float((-sums / counts).exp().mean()),
            "ess": effective_share(1.0 + excess, 1.0 + chi2),
            "chi2_token": chi2,
            "chi2_sequence": float((2.0 * products).exp().mean()) - 1.0,
        }


def _filled(blocks: list[Tensor], counts: list[Tensor]) -> Tensor:
    """``blocks`` as one, without the sequences that have no counted token."""
    if not blocks:
        return torch.zeros(0, dtype=torch.float64)
    return torch.cat(blocks)[torch.cat(counts) > 0]


def effective_share(mean: float, mean_square: float) -> float:
    """Effective sample size of importance weights as a share, E[w]^2 / E[w^2], within [0, 1]; 0 where all are 0."""
    return mean * mean / mean_square if mean_square > 0 else 0.0
