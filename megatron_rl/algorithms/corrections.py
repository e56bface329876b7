"""Corrections of the mismatch between the server's policy (mu), which sampled the tokens, and the trainer's (pi_old).

``rho = pi_old / mu`` per token, with ``log rho`` clamped to +- 20; per sequence, the product or the geometric mean over
its *counted* tokens. A correction is per-token data, weights and a mask; it is independent of the loss and carries no
gradient.

Invariants: equal policies (rho = 1) give weights of exactly 1 and the mask unchanged, provided that 1 is within the
bounds; weights are 0 outside the mask; rejection and veto change the mask, and with it the loss's denominator; weights,
including IcePop's zeros, do not.

The arguments cover the whole step's batch, so that means over the batch are means over the step.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms import register
from megatron_rl.algorithms.cpu_loops import array, run, write_weights
from megatron_rl.algorithms.loss import MAX_LOG_RATIO, keep, mask_to_bool
from megatron_rl.algorithms.mismatch import RatioSums, ess_fraction, masked_log_ratios
from megatron_rl.algorithms.sequences import count_nonzero, exact_sums, exp, expm1, repeat_per_sequence, sequence_index
from megatron_rl.algorithms.shapes import (
    check_cu_seqlens,
    check_float_vector,
    check_mask,
    check_not_negative,
    check_positive,
    check_same_kind,
    describe,
)


@dataclass(frozen=True)
class Correction:
    weights: Tensor
    """[T] in the dtype of the log-probs, without gradient: factors of the tokens' losses; 0 outside ``mask``."""
    mask: Tensor
    """[T] bool: the tokens that still train."""
    metrics: dict[str, float]
    """Metrics of ``mismatch_metrics`` for the given tokens, and metrics of the correction:

    masked_share: tokens that no longer train, because of rejection, veto or a weight of 0.
    rejected_share: tokens that were removed from the mask.
    vetoed_sequence_share: sequences with a vetoed token.
    truncated_share: remaining tokens whose weight was clamped to ``max_weight``.
    weight_mean: mean weight of the remaining tokens, before ``normalize``.
    weight_ess: effective sample size of the weights as a fraction, 1 / E[(w / E w)^2] over the remaining tokens.
    """


@dataclass(frozen=True)
class LogRatios:
    """log rho in float64, either of all tokens (0 outside the mask) or of the counted tokens alone.

    Results per sequence are repeated for each of its tokens.
    """

    token: Tensor
    """[T] clamped to +- 20."""
    bounds: Tensor
    """[N+1] int64 on the CPU: start of each sequence."""
    sums: Tensor
    """[N] sum of log rho over the counted tokens."""
    counts: Tensor
    """[N] number of counted tokens."""

    @cached_property
    def sequence_of(self) -> Tensor:
        """[T] int64: index of each token's sequence."""
        return sequence_index(self.bounds, self.token.device)

    @cached_property
    def product(self) -> Tensor:
        """[T] log of the sequence's product of rho: the sum over its counted tokens, clamped like a token's log rho."""
        return repeat_per_sequence(self.sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), self.bounds.diff())

    def sequence_mean(self, per_token: Tensor) -> Tensor:
        """[T] mean of ``per_token`` [T] over the counted tokens of each token's sequence.

        ``per_token`` must be 0 outside the mask.
        """
        return repeat_per_sequence(exact_sums(per_token, self.bounds) / self.counts.clamp(min=1), self.bounds.diff())

    def any_of_sequence(self, per_token: Tensor) -> Tensor:
        """[T] bool: True if ``per_token`` [T] bool is True for any token of the same sequence."""
        return repeat_per_sequence(exact_sums(per_token, self.bounds) > 0, self.bounds.diff())


@torch.no_grad()
def mismatch_correction(  # noqa: PLR0913  public, and each number is a term of the formula
    rollout_logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    weight: str = "none",
    max_weight: float = 2.0,
    icepop_low: float = 0.5,
    icepop_high: float = 5.0,
    rejection: str = "none",
    rejection_low: float = 0.5,
    rejection_high: float = 2.0,
    veto_below: float = 0.0,
    normalize: bool = False,
    weight_options: Mapping[str, Any] | None = None,
    rejection_options: Mapping[str, Any] | None = None,
) -> Correction:
    """Importance weights and rejections for the mismatch between server and trainer. Synchronizes with the GPU.

    Args:
        rollout_logprobs: [T] float32 or float64: log mu, from the server, at sampling.
        old_logprobs: [T] same dtype and device: log pi_old, from the trainer, before the update.
        mask, cu_seqlens: [T] 0/1 of any real dtype: the tokens to train; [N+1] int32 or int64.
        weight: "none"; "token": min(rho_t, max_weight), token TIS; "sequence": min(prod rho, max_weight) on each of
            the sequence's tokens, sequence TIS; "icepop": rho_t within [icepop_low, icepop_high], else 0.
        max_weight: more than 0 (usual: 1.5 to 5 for tokens, 2 to 10 for sequences); read with "token" and "sequence".
        rejection: rule that removes tokens from the mask. "none"; "token": tokens with rho outside [rejection_low,
            rejection_high]; "sequence" (MIS): sequences with prod rho outside; "geometric": sequences with
            exp(mean log rho) outside (usual: 0.999 to 1.001); "k2": sequences with mean (log rho)^2 / 2 above
            rejection_high (usual: 2); "k3": sequences with mean (rho - 1 - log rho) above it (usual: 0.001 to 0.01).
        veto_below: sequences with a token whose rho is below this bound are removed; 0: none (usual: 1e-4).
        normalize: divide the weights by their mean over the remaining tokens ("sequence": over sequences).
        weight_options, rejection_options: keyword arguments of a ``weight`` or ``rejection`` given as
            package.module:function.

    Raises:
        ValueError: shapes, dtypes, names or ranges do not fit, or a log-prob of a token to train is NaN.
    """
    check_float_vector("rollout_logprobs", rollout_logprobs)
    check_same_kind("old_logprobs", old_logprobs, "rollout_logprobs", rollout_logprobs)
    check_mask(mask, "rollout_logprobs", rollout_logprobs)
    weigh, accepts = register.CORRECTION_WEIGHTS.bind(weight, weight_options), register.REJECTIONS.bind(rejection, rejection_options)
    rules = _Rules(
        weight,
        rejection,
        partial(weigh, max_weight=max_weight, icepop_low=icepop_low, icepop_high=icepop_high),
        partial(accepts, rejection_low=rejection_low, rejection_high=rejection_high),
        max_weight=max_weight,
        veto_below=check_not_negative("veto_below", veto_below),
    )
    return rules.correction(rollout_logprobs, old_logprobs, mask, check_cu_seqlens(cu_seqlens, len(mask)), normalize)


@dataclass(frozen=True)
class _Rules:
    """The bound rejection rule and weight function of one ``mismatch_correction`` call."""

    weight: str
    rejection: str
    weigh: Callable[..., Any]
    accepts: Callable[..., Any]
    max_weight: float
    veto_below: float

    def correction(
        self, rollout_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, bounds: Tensor, normalize: bool
    ) -> Correction:
        """Apply both rules to checked inputs, in blocks of whole sequences if both are registered as ``local``.

        ``bounds``: [N+1] int64 on the CPU. ``normalize``: divide the weights by their mean.
        """
        entry = register.CORRECTION_WEIGHTS.find(self.weight)
        in_blocks = entry.local and register.REJECTIONS.find(self.rejection).local
        bound = check_positive("max_weight", self.max_weight) if entry.bounded else math.inf
        # float64 only for weights that are divided by their mean afterwards; otherwise the dtype of the result.
        sums, raw = _Sums(), np.zeros(len(mask), np.float64 if normalize else array(old_logprobs[:0]).dtype)
        kept = np.zeros(len(mask), bool)
        for block in masked_log_ratios(old_logprobs, rollout_logprobs, mask, bounds, at_once=not in_blocks):
            span, counts = block.tokens, block.bounds.diff().double()
            ratios = LogRatios(block.log_ratio, block.bounds, exact_sums(block.log_ratio, block.bounds), counts)
            _check_comparable(ratios, rollout_logprobs[span], old_logprobs[span], mask[span], span.start)
            vetoed = _vetoed(ratios, self.veto_below)
            remains = self._remaining(ratios, vetoed)
            importance = _per_token(f"correction weight {self.weight!r}", self.weigh(ratios=ratios), ratios).double()
            totals = run(write_weights, array(importance), array(remains), bound, block.runs, raw[span], kept[span])
            sums.add(ratios, vetoed, totals)
            if entry.per_sequence and normalize:
                sums.add_sequences(ratios, remains, keep(importance, remains).clamp(max=bound))
        weights = torch.from_numpy(raw / sums.mean_weight() if normalize else raw).to(old_logprobs)
        return Correction(weights, torch.from_numpy(kept).to(mask.device), sums.metrics())

    def _remaining(self, ratios: LogRatios, vetoed: Tensor) -> Tensor:
        """Tokens that pass the rejection rule and the veto, [K] bool; ``vetoed``: [N] bool."""
        remains = _per_token(f"rejection {self.rejection!r}", self.accepts(ratios=ratios), ratios).bool()
        return remains & ~repeat_per_sequence(vetoed, ratios.bounds.diff()) if self.veto_below else remains


@torch.no_grad()
def importance_weights(
    rollout_logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    weight: str,
    max_weight: float,
    icepop_low: float,
    icepop_high: float,
) -> Tensor:
    """[T] weights of ``mismatch_correction`` without rejection, veto and normalization.

    The weights of a sequence depend on that sequence alone.
    """
    bounds = check_cu_seqlens(cu_seqlens, len(old_logprobs))
    ratios = _ratios(rollout_logprobs, old_logprobs, mask != 0, bounds)
    entry = register.CORRECTION_WEIGHTS.find(weight)
    weigh = register.CORRECTION_WEIGHTS.bind(weight, None)
    importance = weigh(ratios=ratios, max_weight=max_weight, icepop_low=icepop_low, icepop_high=icepop_high)
    importance = keep(_per_token(f"correction weight {weight!r}", importance, ratios).double(), mask != 0)
    return importance.clamp(max=max_weight if entry.bounded else math.inf).to(old_logprobs.dtype)


@torch.no_grad()
def off_policy_sequence_mask(
    old_logprobs: Tensor, logprobs: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor, delta: float
) -> Tensor:
    """Mask tokens of bad responses that have become unlikely: off-policy sequence masking (DeepSeek-V3.2).

    A token is masked if its advantage is negative and ``mean log(pi_old / pi)`` over the counted tokens of its sequence
    is above ``delta``. The public implementations keep the loss's denominator: multiply ``weights`` by the result.

    Args:
        old_logprobs: [T] float32 or float64: log-probs of the policy that the samples are attributed to.
        logprobs: [T] same dtype and device: log-probs of the current policy, taken as constants.
        advantages: [T] same dtype and device; equal for all tokens of a response, or different per token.
        mask: [T] 0/1 of any real dtype.
        cu_seqlens: [N+1] int32 or int64; a sequence must not be split over calls.
        delta: at least 0 (usual: 1e-4 to 0.5).

    Returns:
        [T] bool: ``mask`` without those tokens.
    """
    check_float_vector("old_logprobs", old_logprobs)
    check_same_kind("logprobs", logprobs, "old_logprobs", old_logprobs)
    check_same_kind("advantages", advantages, "old_logprobs", old_logprobs)
    check_mask(mask, "old_logprobs", old_logprobs)
    check_not_negative("delta", delta)
    counted = mask != 0
    # These are ratios pi_old / pi, unlike the correction's pi_old / mu.
    ratios = _ratios(logprobs, old_logprobs, counted, check_cu_seqlens(cu_seqlens, len(old_logprobs)))
    is_unlikely = ratios.sequence_mean(ratios.token) > delta
    return counted & ~(is_unlikely & (advantages < 0))


def _ratios(denominator: Tensor, numerator: Tensor, counted: Tensor, bounds: Tensor) -> LogRatios:
    """Ratios log(numerator / denominator) from log-probs [T]."""
    token = (numerator.double() - denominator.double()).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # The usual case, in which two passes over the tokens are saved.
    if count_nonzero(counted) == len(counted):
        counts = bounds.diff().to(token)
    else:
        token, counts = keep(token, counted), exact_sums(counted, bounds)
    return LogRatios(token, bounds, exact_sums(token, bounds), counts)


def _vetoed(ratios: LogRatios, veto_below: float) -> Tensor:
    """[N] bool: True for sequences with a token whose rho is below the bound; a bound of 0 vetoes nothing."""
    if veto_below == 0:
        return torch.zeros_like(ratios.counts, dtype=torch.bool)
    return exact_sums(exp(ratios.token) < veto_below, ratios.bounds) > 0


@register.rejection("none", local=True)
def _accept_all(ratios: LogRatios) -> Tensor:
    """All tokens train."""
    return torch.ones_like(ratios.token, dtype=torch.bool)


@register.rejection("token", local=True)
def _accept_tokens(ratios: LogRatios, rejection_low: float, rejection_high: float) -> Tensor:
    """Rejects tokens with rho outside [low, high]."""
    return _within(ratios.token, rejection_low, rejection_high)


@register.rejection("sequence", local=True)
def _accept_sequences(ratios: LogRatios, rejection_low: float, rejection_high: float) -> Tensor:
    """Rejects responses with prod rho outside [low, high] (MIS)."""
    return _within(ratios.product, rejection_low, rejection_high)


@register.rejection("geometric", local=True)
def _accept_geometric(ratios: LogRatios, rejection_low: float, rejection_high: float) -> Tensor:
    """Rejects responses with exp(mean log rho) outside [low, high]."""
    return _within(ratios.sequence_mean(ratios.token), rejection_low, rejection_high)


@register.rejection("k2", local=True)
def _accept_k2(ratios: LogRatios, rejection_high: float) -> Tensor:
    """Rejects responses with mean (log rho)^2 / 2 above high."""
    return ratios.sequence_mean(0.5 * ratios.token.square()) <= check_not_negative("rejection_high", rejection_high)


@register.rejection("k3", local=True)
def _accept_k3(ratios: LogRatios, rejection_high: float) -> Tensor:
    """Rejects responses with mean (rho - 1 - log rho) above high."""
    distance = expm1(ratios.token) - ratios.token
    return ratios.sequence_mean(distance) <= check_not_negative("rejection_high", rejection_high)


def _within(log_ratio: Tensor, low: float, high: float) -> Tensor:
    _check_interval("rejection", low, high)
    ratio = exp(log_ratio)
    return (ratio >= low) & (ratio <= high)


@register.correction_weight("none", local=True)
def _no_weight(ratios: LogRatios) -> Tensor:
    """No correction: every token has weight 1."""
    return torch.ones_like(ratios.token)


@register.correction_weight("token", bounded=True, local=True)
def _token_weight(ratios: LogRatios) -> Tensor:
    """min(rho_t, max_weight): token TIS."""
    return exp(ratios.token)


@register.correction_weight("sequence", bounded=True, per_sequence=True, local=True)
def _sequence_weight(ratios: LogRatios) -> Tensor:
    """min(prod rho, max_weight): sequence TIS."""
    return exp(ratios.product)


@register.correction_weight("icepop", local=True)
def _icepop_weight(ratios: LogRatios, icepop_low: float, icepop_high: float) -> Tensor:
    """rho_t inside [icepop_low, icepop_high], else 0; the denominator is unchanged."""
    _check_interval("icepop", icepop_low, icepop_high)
    rho = exp(ratios.token)
    return torch.where((rho >= icepop_low) & (rho <= icepop_high), rho, 0.0)


def _per_token(what: str, result: Tensor, ratios: LogRatios) -> Tensor:
    if not isinstance(result, Tensor) or result.shape != ratios.token.shape:
        raise ValueError(f"{what}: expected [{len(ratios.token)}], one value per token, got {describe(result)}")
    return result


class _Sums:
    """Accumulators of a batch's metrics and mean weight, filled with one block of whole sequences at a time."""

    def __init__(self) -> None:
        self._ratios = RatioSums()
        self._num_kept = self._num_weighted = self._num_truncated = self._num_vetoed = 0
        self._weight = self._weight_square = 0.0
        self._mean_weights: list[Tensor] = []

    def add(self, ratios: LogRatios, vetoed: Tensor, totals: tuple[int, int, int, float, float]) -> None:
        """Add a block; ``vetoed`` [N] bool; ``totals``: result of ``write_weights``."""
        self._ratios.add(ratios.token, ratios.sums, ratios.counts)
        self._num_vetoed += count_nonzero(vetoed)
        num_kept, num_weighted, num_truncated, weight, weight_square = totals
        self._num_kept, self._num_weighted = self._num_kept + num_kept, self._num_weighted + num_weighted
        self._num_truncated += num_truncated
        self._weight, self._weight_square = self._weight + weight, self._weight_square + weight_square

    def add_sequences(self, ratios: LogRatios, kept: Tensor, weights: Tensor) -> None:
        """Store the mean weight over the kept tokens of each of a block's sequences; ``mean_weight`` then averages over sequences."""
        counts = exact_sums(kept, ratios.bounds)
        self._mean_weights.append((exact_sums(weights, ratios.bounds) / counts)[counts > 0])

    def mean_weight(self) -> float:
        """Mean weight over the remaining tokens, or over sequences; 1 if there are none or the mean is 0."""
        if self._mean_weights:
            means = torch.cat(self._mean_weights)
            mean = float(means.sum()) / max(len(means), 1)
        else:
            mean = self._weight / max(self._num_kept, 1)
        return mean if mean > 0 else 1.0

    def metrics(self) -> dict[str, float]:
        """The metrics that ``Correction.metrics`` documents."""
        counts, num_kept = self._ratios.counts(), max(self._num_kept, 1)
        num_counted, num_sequences = int(counts.sum()), max(len(counts), 1)
        mean, mean_square = self._weight / num_kept, self._weight_square / num_kept
        return self._ratios.metrics() | {
            "masked_share": (num_counted - self._num_weighted) / max(num_counted, 1),
            "rejected_share": (num_counted - self._num_kept) / max(num_counted, 1),
            "vetoed_sequence_share": self._num_vetoed / num_sequences,
            "truncated_share": self._num_truncated / num_kept,
            "weight_mean": mean if self._num_kept else 1.0,
            "weight_ess": ess_fraction(mean, mean_square) if self._num_kept else 1.0,
        }


def _check_interval(name: str, low: float, high: float) -> None:
    if not 0.0 <= low <= high:
        raise ValueError(f"{name}_low, {name}_high: expected 0 <= low <= high, got {low!r} and {high!r}")


def _check_comparable(ratios: LogRatios, rollout_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, offset: int) -> None:
    """Raise ValueError if a ratio is NaN, because NaN would pass every bound and enter the loss as a weight.

    ``offset``: index of the block's first token, for the message.
    """
    # A sum is NaN exactly if one of its tokens is, and sums are far fewer than tokens.
    if not ratios.sums.isnan().any():
        return
    unknown = mask_to_bool(mask).nonzero()[ratios.token.isnan().to(mask.device)]
    token = int(unknown[0])
    raise ValueError(
        f"rollout_logprobs, old_logprobs: expected numbers everywhere in the mask, got "
        f"{float(rollout_logprobs[token])} and {float(old_logprobs[token])} at token {offset + token} "
        f"({len(unknown)} such tokens near it); take tokens without a log-prob out of the mask"
    )
