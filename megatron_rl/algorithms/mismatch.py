"""How far the rollout engine's policy (mu) is from the trainer's (pi_old) on the same tokens.

Sign convention, everywhere: ``log rho = log pi_old - log mu``, and the tokens were drawn from mu. So the mean of
``-log rho`` estimates KL(mu || pi_old), and so does k3, the mean of ``rho - 1 - log rho``. Equal policies give
kl = k3 = 0, ratio 1, effective sample size 1, chi^2 = 0.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.algorithms.loss import MAX_LOG_RATIO, mask_to_bool
from megatron_rl.algorithms.sequences import counts_by_sequence, edges, exact_sums, sequence_blocks
from megatron_rl.algorithms.shapes import check_cu_seqlens, check_float_vector, check_mask, check_same_kind
from megatron_rl.algorithms.token_sums import array, log_ratios, ratio_sums, run

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
class MismatchStats:
    """How far two engines are apart on the same sampled tokens; all 0 for none."""

    mean: float
    """Of |log rho|, nats."""
    k3: float
    """Mean of rho - 1 - log rho, nats."""
    outliers: float
    """Share of tokens with |log rho| above ln 2."""
    max: float
    """Largest |log rho|, nats."""


def mismatch_figures(log_rho: Tensor) -> MismatchStats:
    """``log_rho`` [K], trainer minus engine. A difference that is not a number counts as infinite."""
    if not len(log_rho):
        return MismatchStats(0.0, 0.0, 0.0, 0.0)
    log_rho = log_rho.double()
    difference = log_rho.abs().nan_to_num(nan=math.inf, posinf=math.inf)
    clamped = log_rho.nan_to_num(nan=MAX_LOG_RATIO).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return MismatchStats(
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
    for counted in masked_log_ratios(old_logprobs, rollout_logprobs, mask, bounds):
        sums.add(counted.log_ratio, exact_sums(counted.log_ratio, counted.bounds), counted.bounds.diff().double())
    return sums.metrics()


@dataclass(frozen=True)
class CountedRatios:
    """The counted tokens of some sequences, back to back."""

    tokens: slice
    """Those of the sequences among all, counted or not."""
    runs: np.ndarray
    """[R, 2] int64: first and end of each stretch of counted ones, from the slice's start."""
    log_ratio: Tensor
    """[K] float64 on the CPU, cut to +- 20."""
    bounds: Tensor
    """[N+1] int64: where each sequence starts in ``log_ratio``."""


def masked_log_ratios(
    numerator: Tensor, denominator: Tensor, mask: Tensor, bounds: Tensor, *, at_once: bool = False
) -> Iterator[CountedRatios]:
    """Log ratios of log-probs [T] in ``mask`` [T], a block of sequences after the other; ``at_once``: all in one."""
    over, under, runs = array(numerator), array(denominator), edges(array(mask_to_bool(mask))).reshape(-1, 2)
    places = F.pad(counts_by_sequence(mask, bounds).cumsum(0), (1, 0))
    for first, end in [(0, len(bounds) - 1)] if at_once else sequence_blocks(places):
        tokens = slice(int(bounds[first]), int(bounds[end]))
        within = slice(np.searchsorted(runs[:, 1], tokens.start, "right"), np.searchsorted(runs[:, 0], tokens.stop))
        own = np.clip(runs[within], tokens.start, tokens.stop) - tokens.start
        found = np.empty(int(places[end] - places[first]))
        run(log_ratios, over[tokens], under[tokens], own, MAX_LOG_RATIO, found)
        yield CountedRatios(tokens, own, torch.from_numpy(found), places[first : end + 1] - places[first])


class RatioSums:
    """What ``mismatch_metrics`` are made of, in float64; blocks of whole sequences are added one after the other."""

    def __init__(self) -> None:
        self._excess = self._excess_square = self._k3 = self._max = 0.0
        self._sums: list[Tensor] = []
        self._counts: list[Tensor] = []

    def add(self, log_rho: Tensor, sums: Tensor, counts: Tensor) -> None:
        """``log_rho`` [K] of counted tokens, float64, clamped; ``sums`` and ``counts`` [N] over each sequence."""
        if not len(log_rho):
            return
        excess, squares, k3 = run(ratio_sums, log_rho.numpy(), np.expm1(log_rho.numpy()))  # rho - 1
        self._excess, self._excess_square, self._k3 = self._excess + excess, self._excess_square + squares, self._k3 + k3
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
            "ess": ess_fraction(1.0 + excess, 1.0 + chi2),
            "chi2_token": chi2,
            "chi2_sequence": float((2.0 * products).exp().mean()) - 1.0,
        }


def _filled(blocks: list[Tensor], counts: list[Tensor]) -> Tensor:
    """``blocks`` as one, without the sequences that have no counted token."""
    if not blocks:
        return torch.zeros(0, dtype=torch.float64)
    return torch.cat(blocks)[torch.cat(counts) > 0]


def ess_fraction(mean: float, mean_square: float) -> float:
    """Effective sample size of importance weights as a share, E[w]^2 / E[w^2], within [0, 1]; 0 where all are 0."""
    return mean * mean / mean_square if mean_square > 0 else 0.0
