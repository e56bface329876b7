"""Corrections for tokens that the rollout engine (mu) drew and the trainer (pi_old) learns from (mismatch fixes).

``rho = pi_old / mu`` token by token, ``log rho`` clamped to +- 20, and for a sequence the product or the geometric mean
over its *counted* tokens. A correction is per-token data, weights and a mask; it knows no loss and carries no gradient.

Laws: engines that agree (rho = 1) give weights of exactly 1 and the mask unchanged, as long as 1 lies within the
bounds; weights are 0 outside the mask;
rejection and veto change the mask, and so the denominator of the loss; weights, IcePop's zeros among them, do not.

Hand in the whole step's batch: means over the batch are then means over the step.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms.loss import keep
from megatron_rl.algorithms.mismatch import MAX_LOG_RATIO, effective_sample_size, mismatch_metrics
from megatron_rl.algorithms.sequences import sequence_index, sequence_sums
from megatron_rl.algorithms.shapes import (
    check_choice,
    check_cu_seqlens,
    check_float_vector,
    check_mask,
    check_not_negative,
    check_same_kind,
)

WEIGHTS = ("none", "token", "sequence", "icepop")
REJECTIONS = ("none", "token", "sequence", "geometric", "k2", "k3")


@dataclass(frozen=True)
class Correction:
    weights: Tensor
    """[T] in the dtype of the log-probs, without gradient: what each token's loss is multiplied by; 0 outside ``mask``."""
    mask: Tensor
    """[T] bool: the tokens that still train."""
    metrics: dict[str, float]
    """What ``mismatch_metrics`` says of the tokens given, and what the correction did:

    masked_share: tokens that no longer train, be it by rejection, veto or a weight of 0.
    rejected_share: tokens that left the mask.
    vetoed_sequence_share: sequences with a vetoed token.
    truncated_share: remaining tokens whose weight was cut to ``max_weight``.
    weight_mean: mean weight of the remaining tokens, before ``normalize``.
    weight_ess: effective sample size of the weights as a share, 1 / E[(w / E w)^2] over the remaining tokens.
    """


@dataclass(frozen=True)
class _Ratios:
    """log rho in float64, 0 outside the mask; sequence numbers are spread over the sequences' tokens."""

    token: Tensor
    """[T]"""
    product: Tensor
    """[T] of the sequence: sum over its counted tokens, clamped like a token's."""
    sequence_of: Tensor
    """[T] int64"""
    counts: Tensor
    """[N] counted tokens."""

    def sequence_mean(self, per_token: Tensor) -> Tensor:
        """[T] mean of ``per_token`` [T], which is 0 outside the mask, over the counted tokens of the own sequence."""
        sums = sequence_sums(per_token, self.sequence_of, len(self.counts))
        return (sums / self.counts.clamp(min=1))[self.sequence_of]

    def any_of_sequence(self, per_token: Tensor) -> Tensor:
        """[T] bool: whether ``per_token`` [T] bool holds anywhere in the own sequence."""
        return (sequence_sums(per_token.double(), self.sequence_of, len(self.counts)) > 0)[self.sequence_of]


@torch.no_grad()
def mismatch_correction(
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
) -> Correction:
    """Importance weights and rejections for the difference between engine and trainer. Waits for the device.

    Args:
        rollout_logprobs: [T] float32 or float64: log mu, the engine's, at sampling.
        old_logprobs: [T] same dtype and device: log pi_old, the trainer's, before the update.
        mask: [T] 0/1 of any real dtype: the tokens to train.
        cu_seqlens: [N+1] int32 or int64.
        weight: "none"; "token": min(rho_t, max_weight), token TIS; "sequence": min(prod rho, max_weight) on each of
            the sequence's tokens, sequence TIS; "icepop": rho_t within [icepop_low, icepop_high], else 0.
        max_weight: more than 0 (in use: 1.5 to 5 for tokens, 2 to 10 for sequences); read with "token" and "sequence".
        rejection: what leaves the mask. "none"; "token": tokens with rho outside [rejection_low, rejection_high];
            "sequence" (MIS): sequences with prod rho outside; "geometric": with exp(mean log rho) outside (in use:
            0.999 to 1.001); "k2": with mean (log rho)^2 / 2 above rejection_high (in use: 2); "k3": with
            mean (rho - 1 - log rho) above it (in use: 0.001 to 0.01).
        veto_below: sequences with a token whose rho is below this leave the mask; 0: none (in use: 1e-4).
        normalize: divide the weights by their mean over the remaining tokens ("sequence": over sequences).

    Raises:
        ValueError: shapes, dtypes, names or ranges do not fit, or a token to train has no number to compare.
    """
    check_float_vector("rollout_logprobs", rollout_logprobs)
    check_same_kind("old_logprobs", old_logprobs, "rollout_logprobs", rollout_logprobs)
    check_mask(mask, "rollout_logprobs", rollout_logprobs)
    check_choice("weight", weight, WEIGHTS)
    check_choice("rejection", rejection, REJECTIONS)
    counted = mask != 0
    ratios = _ratios(rollout_logprobs, old_logprobs, counted, cu_seqlens)
    _check_comparable(ratios, rollout_logprobs, old_logprobs)

    vetoed = ratios.any_of_sequence(counted & (ratios.token.exp() < check_not_negative("veto_below", veto_below)))
    kept = counted & ~vetoed & _accepted(ratios, rejection, rejection_low, rejection_high)
    importance = keep(_importance(ratios, weight, icepop_low, icepop_high), kept)
    truncated = kept & (importance > _bound(weight, max_weight))
    raw = importance.clamp(max=_bound(weight, max_weight))
    weights = raw / _mean_weight(raw, kept, ratios, weight) if normalize else raw

    metrics = mismatch_metrics(old_logprobs, rollout_logprobs, mask, cu_seqlens)
    num_counted, remaining = max(int(counted.sum()), 1), raw[kept]
    metrics |= {
        "masked_share": int((counted & (raw == 0)).sum()) / num_counted,
        "rejected_share": int((counted & ~kept).sum()) / num_counted,
        "vetoed_sequence_share": _sequence_share(counted & vetoed, ratios),
        "truncated_share": int(truncated.sum()) / max(len(remaining), 1),
        "weight_mean": float(remaining.mean()) if len(remaining) else 1.0,
        "weight_ess": effective_sample_size(remaining),
    }
    return Correction(weights.to(old_logprobs.dtype), kept, metrics)


@torch.no_grad()
def off_policy_sequence_mask(
    old_logprobs: Tensor, logprobs: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor, delta: float
) -> Tensor:
    """Leave out what was bad and is no longer likely: off-policy sequence masking (DeepSeek-V3.2).

    A token goes when its advantage is negative and ``mean log(pi_old / pi)`` over the counted tokens of its sequence
    is above ``delta``. The public implementations keep the loss's denominator: multiply ``weights`` by the result.

    Args:
        old_logprobs: [T] float32 or float64, of the policy that the samples count as drawn from.
        logprobs: [T] same dtype and device, of the current policy; no gradient is taken.
        advantages: [T] same dtype and device; one number a response, or token by token.
        mask: [T] 0/1 of any real dtype.
        cu_seqlens: [N+1] int32 or int64; a sequence must not be split over calls.
        delta: at least 0 (in use: 1e-4 to 0.5).

    Returns:
        [T] bool: ``mask`` without those tokens.
    """
    check_float_vector("old_logprobs", old_logprobs)
    check_same_kind("logprobs", logprobs, "old_logprobs", old_logprobs)
    check_same_kind("advantages", advantages, "old_logprobs", old_logprobs)
    check_mask(mask, "old_logprobs", old_logprobs)
    check_not_negative("delta", delta)
    counted = mask != 0
    # Of pi_old / pi, where the correction is of pi_old / mu.
    ratios = _ratios(logprobs, old_logprobs, counted, cu_seqlens)
    left_behind = ratios.sequence_mean(ratios.token) > delta
    return counted & ~(left_behind & (advantages < 0))


def _ratios(denominator: Tensor, numerator: Tensor, counted: Tensor, cu_seqlens: Tensor) -> _Ratios:
    """log(numerator / denominator) of log-probs [T]."""
    bounds = check_cu_seqlens(cu_seqlens, len(numerator))
    difference = keep(numerator, counted).double() - keep(denominator, counted).double()
    token = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    sequence_of = sequence_index(bounds, token.device)
    num_sequences = len(bounds) - 1
    product = sequence_sums(token, sequence_of, num_sequences).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    counts = sequence_sums(counted.double(), sequence_of, num_sequences)
    return _Ratios(token, product[sequence_of], sequence_of, counts)


def _accepted(ratios: _Ratios, rejection: str, low: float, high: float) -> Tensor:
    """[T] bool: tokens that the rejection rule lets pass."""
    if rejection == "none":
        return torch.ones_like(ratios.token, dtype=torch.bool)
    if rejection == "k2":
        return ratios.sequence_mean(0.5 * ratios.token.square()) <= check_not_negative("rejection_high", high)
    if rejection == "k3":
        distance = torch.expm1(ratios.token) - ratios.token
        return ratios.sequence_mean(distance) <= check_not_negative("rejection_high", high)
    _check_interval("rejection", low, high)
    log_ratio = {
        "token": ratios.token,
        "sequence": ratios.product,
        "geometric": ratios.sequence_mean(ratios.token),
    }[rejection]
    return (log_ratio.exp() >= low) & (log_ratio.exp() <= high)


def _importance(ratios: _Ratios, weight: str, icepop_low: float, icepop_high: float) -> Tensor:
    """[T] float64 importance weights without a bound."""
    if weight == "none":
        return torch.ones_like(ratios.token)
    if weight == "sequence":
        return ratios.product.exp()
    rho = ratios.token.exp()
    if weight == "token":
        return rho
    _check_interval("icepop", icepop_low, icepop_high)
    return torch.where((rho >= icepop_low) & (rho <= icepop_high), rho, 0.0)


def _bound(weight: str, max_weight: float) -> float:
    """What the weights are cut to; IcePop has an interval instead."""
    if weight not in ("token", "sequence"):
        return math.inf
    if not max_weight > 0.0:
        raise ValueError(f"max_weight: expected a number above 0, got {max_weight!r}")
    return float(max_weight)


def _mean_weight(weights: Tensor, kept: Tensor, ratios: _Ratios, weight: str) -> Tensor:
    """[] mean over the remaining tokens, or sequences; 1 where there is nothing to divide by."""
    if weight == "sequence":
        sums, counts = (
            sequence_sums(values, ratios.sequence_of, len(ratios.counts)) for values in (weights, kept.double())
        )
        mean = (sums[counts > 0] / counts[counts > 0]).sum() / (counts > 0).sum().clamp(min=1)
    else:
        mean = weights.sum() / kept.sum().clamp(min=1)
    return torch.where(mean > 0, mean, 1.0)


def _sequence_share(tokens: Tensor, ratios: _Ratios) -> float:
    """Share of the sequences with counted tokens that hold one of ``tokens`` [T] bool."""
    hit = sequence_sums(tokens.double(), ratios.sequence_of, len(ratios.counts)) > 0
    return int(hit.sum()) / max(int((ratios.counts > 0).sum()), 1)


def _check_interval(name: str, low: float, high: float) -> None:
    if not 0.0 <= low <= high:
        raise ValueError(f"{name}_low, {name}_high: expected 0 <= low <= high, got {low!r} and {high!r}")


def _check_comparable(ratios: _Ratios, rollout_logprobs: Tensor, old_logprobs: Tensor) -> None:
    """Refuse NaN: it would pass every bound and reach the loss as a weight."""
    unknown = ratios.token.isnan().nonzero()
    if len(unknown) > 0:
        token = int(unknown[0])
        raise ValueError(
            f"rollout_logprobs, old_logprobs: expected numbers wherever the mask counts, got "
            f"{float(rollout_logprobs[token])} and {float(old_logprobs[token])} at token {token} "
            f"({len(unknown)} such tokens); take tokens without a log-prob out of the mask"
        )
