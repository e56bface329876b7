"""Measures the difference between the servers' policy (mu) and the trainer's (pi_old) on the same tokens.

Sign convention, everywhere: ``log rho = log pi_old - log mu``, and the tokens were sampled from mu. Hence the mean of
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

from megatron_rl.algorithms.cpu_loops import array, log_ratios, ratio_sums, run
from megatron_rl.algorithms.loss import MAX_LOG_RATIO, mask_to_bool
from megatron_rl.algorithms.sequences import counts_by_sequence, edges, exact_sums, sequence_blocks
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
"""Threshold in nats: one side gives the token more than twice the probability of the other."""


@dataclass(frozen=True)
class MismatchStats:
    """Statistics of log rho between trainer and server on the same sampled tokens; all 0 for an empty input."""

    mean: float
    """Mean of |log rho|, nats."""
    k3: float
    """Mean of rho - 1 - log rho, nats."""
    outliers: float
    """Fraction of tokens with |log rho| above ln 2."""
    max: float
    """Largest |log rho|, nats."""


def mismatch_figures(log_rho: Tensor) -> MismatchStats:
    """Statistics of ``log_rho`` [K], trainer minus server. NaN counts as an infinite difference."""
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
    """Metrics of the mismatch, which are logged with and without a correction. Synchronizes with the GPU.

    Args:
        old_logprobs: [T] float32 or float64: log-probs of the trainer before the update.
        rollout_logprobs: [T] same dtype and device: log-probs of the server at sampling.
        mask: [T] 0/1 of any real dtype: the tokens that were sampled.
        cu_seqlens: [N+1] int32 or int64.

    Returns:
        kl: estimate of KL(mu || pi_old) per token by k1, the mean of -log rho.
        k3: the same by the mean of rho - 1 - log rho; never negative.
        max_abs_log_ratio: largest |log rho|.
        ppl_ratio: the trainer's perplexity over the server's, exp(mean of -log rho in a sequence), mean over sequences.
        ess: effective sample size as a fraction, 1 / E[(rho / E rho)^2] over tokens.
        chi2_token: E[rho^2] - 1 over tokens.
        chi2_sequence: E[(product of rho)^2] - 1 over sequences; the log of the product is clamped like log rho.
        An empty mask gives the values of equal policies.
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
    """Log ratios of the counted tokens of consecutive sequences, concatenated."""

    tokens: slice
    """Range of the sequences' tokens, counted or not, in the packed tensors."""
    runs: np.ndarray
    """[R, 2] int64: first and end of each span of counted tokens, relative to the start of ``tokens``."""
    log_ratio: Tensor
    """[K] float64 on the CPU, clamped to +- 20."""
    bounds: Tensor
    """[N+1] int64: start of each sequence in ``log_ratio``."""


def masked_log_ratios(
    numerator: Tensor, denominator: Tensor, mask: Tensor, bounds: Tensor, *, at_once: bool = False
) -> Iterator[CountedRatios]:
    """Yield the log ratios of log-probs [T] in ``mask`` [T], one block of sequences at a time.

    ``at_once`` yields all sequences as one block.
    """
    over, under, runs = array(numerator), array(denominator), edges(array(mask_to_bool(mask))).reshape(-1, 2)
    starts = F.pad(counts_by_sequence(mask, bounds).cumsum(0), (1, 0))
    for first, end in [(0, len(bounds) - 1)] if at_once else sequence_blocks(starts):
        tokens = slice(int(bounds[first]), int(bounds[end]))
        # A span may cross the block's border, so the spans that overlap the block are clipped to it.
        within = slice(np.searchsorted(runs[:, 1], tokens.start, "right"), np.searchsorted(runs[:, 0], tokens.stop))
        block_runs = np.clip(runs[within], tokens.start, tokens.stop) - tokens.start
        log_ratio = np.empty(int(starts[end] - starts[first]))
        run(log_ratios, over[tokens], under[tokens], block_runs, MAX_LOG_RATIO, log_ratio)
        yield CountedRatios(tokens, block_runs, torch.from_numpy(log_ratio), starts[first : end + 1] - starts[first])


class RatioSums:
    """Float64 accumulators of ``mismatch_metrics``, filled with one block of whole sequences at a time."""

    def __init__(self) -> None:
        self._excess = self._excess_square = self._k3 = self._max = 0.0
        self._sums: list[Tensor] = []
        self._counts: list[Tensor] = []

    def add(self, log_rho: Tensor, sums: Tensor, counts: Tensor) -> None:
        """Add a block: ``log_rho`` [K] of counted tokens, float64, clamped; ``sums`` and ``counts`` [N] per sequence."""
        if not len(log_rho):
            return
        excess, squares, k3 = run(ratio_sums, log_rho.numpy(), np.expm1(log_rho.numpy()))  # rho - 1
        self._excess, self._excess_square, self._k3 = self._excess + excess, self._excess_square + squares, self._k3 + k3
        self._max = max(self._max, float(log_rho.amax()), -float(log_rho.amin()))
        self._sums.append(sums)
        self._counts.append(counts)

    def counts(self) -> Tensor:
        """Number of counted tokens of each sequence that has any, float64."""
        return _nonempty(self._counts, self._counts)

    def metrics(self) -> dict[str, float]:
        counts, sums = self.counts(), _nonempty(self._sums, self._counts)
        if not len(counts):
            return dict(EQUAL_POLICIES)
        num_tokens = float(counts.sum())
        excess, excess_square = self._excess / num_tokens, self._excess_square / num_tokens
        # E[rho^2] - 1 as 2 E[rho - 1] + E[(rho - 1)^2], which is precise near rho = 1.
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


def _nonempty(blocks: list[Tensor], counts: list[Tensor]) -> Tensor:
    """``blocks`` concatenated, without the sequences that have no counted token."""
    if not blocks:
        return torch.zeros(0, dtype=torch.float64)
    return torch.cat(blocks)[torch.cat(counts) > 0]


def ess_fraction(mean: float, mean_square: float) -> float:
    """Effective sample size of importance weights as a fraction, E[w]^2 / E[w^2], within [0, 1]; 0 if all weights are 0."""
    return mean * mean / mean_square if mean_square > 0 else 0.0
