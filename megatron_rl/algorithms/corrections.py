"""Corrections for tokens that the rollout engine (mu) drew and the trainer (pi_old) learns from (mismatch fixes).

``rho = pi_old / mu`` token by token, ``log rho`` clamped to +- 20, and for a sequence the product or the geometric mean
over its *counted* tokens. A correction is per-token data, weights and a mask; it knows no loss and carries no gradient.

Laws: engines that agree (rho = 1) give weights of exactly 1 and the mask unchanged, as long as 1 lies within the
bounds; weights are 0 outside the mask; rejection and veto change the mask, and so the denominator of the loss; weights,
IcePop's zeros among them, do not.

Hand in the whole step's batch: means over the batch are then means over the step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms import register
from megatron_rl.algorithms.loss import MAX_LOG_RATIO, chosen, keep
from megatron_rl.algorithms.mismatch import EQUAL_POLICIES, effective_sample_size, metrics_of_ratios
from megatron_rl.algorithms.sequences import sequence_index, sequence_sums
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
class LogRatios:
    """log rho in float64, 0 outside the mask; numbers of a sequence are repeated for each of its tokens."""

    token: Tensor
    """[T] clamped to +- 20."""
    sequence_of: Tensor
    """[T] int64"""
    sums: Tensor
    """[N] over the counted tokens."""
    counts: Tensor
    """[N] counted tokens."""

    @cached_property
    def product(self) -> Tensor:
        """[T] of the sequence: sum over its counted tokens, clamped like a token's."""
        return self.sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[self.sequence_of]

    def sequence_mean(self, per_token: Tensor) -> Tensor:
        """[T] mean of ``per_token`` [T], which is 0 outside the mask, over the counted tokens of the own sequence."""
        sums = sequence_sums(per_token, self.sequence_of, len(self.counts))
        return (sums / self.counts.clamp(min=1))[self.sequence_of]

    def any_of_sequence(self, per_token: Tensor) -> Tensor:
        """[T] bool: whether ``per_token`` [T] bool holds anywhere in the own sequence."""
        return (sequence_sums(per_token.double(), self.sequence_of, len(self.counts)) > 0)[self.sequence_of]


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
    """Importance weights and rejections for the difference between engine and trainer. Waits for the device.

    Args:
        rollout_logprobs: [T] float32 or float64: log mu, the engine's, at sampling.
        old_logprobs: [T] same dtype and device: log pi_old, the trainer's, before the update.
        mask, cu_seqlens: [T] 0/1 of any real dtype: the tokens to train; [N+1] int32 or int64.
        weight: "none"; "token": min(rho_t, max_weight), token TIS; "sequence": min(prod rho, max_weight) on each of
            the sequence's tokens, sequence TIS; "icepop": rho_t within [icepop_low, icepop_high], else 0.
        max_weight: more than 0 (in use: 1.5 to 5 for tokens, 2 to 10 for sequences); read with "token" and "sequence".
        rejection: what leaves the mask. "none"; "token": tokens with rho outside [rejection_low, rejection_high];
            "sequence" (MIS): sequences with prod rho outside; "geometric": with exp(mean log rho) outside (in use:
            0.999 to 1.001); "k2": with mean (log rho)^2 / 2 above rejection_high (in use: 2); "k3": with
            mean (rho - 1 - log rho) above it (in use: 0.001 to 0.01).
        veto_below: sequences with a token whose rho is below this leave the mask; 0: none (in use: 1e-4).
        normalize: divide the weights by their mean over the remaining tokens ("sequence": over sequences).
        weight_options, rejection_options: of a ``weight`` or ``rejection`` that is a package.module:function.

    Raises:
        ValueError: shapes, dtypes, names or ranges do not fit, or a token to train has no number to compare.
    """
    check_float_vector("rollout_logprobs", rollout_logprobs)
    check_same_kind("old_logprobs", old_logprobs, "rollout_logprobs", rollout_logprobs)
    check_mask(mask, "rollout_logprobs", rollout_logprobs)
    counted = mask != 0
    ratios = _ratios(rollout_logprobs, old_logprobs, counted, cu_seqlens)
    _check_comparable(ratios, rollout_logprobs, old_logprobs)

    vetoed = _vetoed(ratios, counted, check_not_negative("veto_below", veto_below))
    accepts = register.REJECTIONS.bind(rejection, rejection_options)
    accepted = accepts(ratios=ratios, rejection_low=rejection_low, rejection_high=rejection_high)
    kept = counted & ~vetoed & _per_token(f"rejection {rejection!r}", accepted, ratios).bool()
    weigh = register.CORRECTION_WEIGHTS.bind(weight, weight_options)
    importance = weigh(ratios=ratios, max_weight=max_weight, icepop_low=icepop_low, icepop_high=icepop_high)
    importance = keep(_per_token(f"correction weight {weight!r}", importance, ratios).double(), kept)
    entry = register.CORRECTION_WEIGHTS.find(weight)
    bound = check_positive("max_weight", max_weight) if entry.bounded else math.inf
    raw = importance.clamp(max=bound)
    weights = raw / _mean_weight(raw, kept, ratios, entry.per_sequence) if normalize else raw

    metrics = metrics_of_ratios(ratios.token, counted, ratios.sums, ratios.counts) if counted.any() else dict(EQUAL_POLICIES)
    metrics |= _what_was_done(counted, vetoed, kept, kept & (importance > bound), raw, ratios)
    return Correction(weights.to(old_logprobs.dtype), kept, metrics)


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
    """[T] the weights of ``mismatch_correction`` without rejection, veto and mean: those of a sequence depend on it alone."""
    ratios = _ratios(rollout_logprobs, old_logprobs, mask != 0, cu_seqlens)
    entry = register.CORRECTION_WEIGHTS.find(weight)
    weigh = register.CORRECTION_WEIGHTS.bind(weight, None)
    importance = weigh(ratios=ratios, max_weight=max_weight, icepop_low=icepop_low, icepop_high=icepop_high)
    importance = keep(_per_token(f"correction weight {weight!r}", importance, ratios).double(), mask != 0)
    return importance.clamp(max=max_weight if entry.bounded else math.inf).to(old_logprobs.dtype)


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
        advantages: [T] same dtype and device; one number per response, or token by token.
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


def _ratios(denominator: Tensor, numerator: Tensor, counted: Tensor, cu_seqlens: Tensor) -> LogRatios:
    """log(numerator / denominator) of log-probs [T]."""
    bounds = check_cu_seqlens(cu_seqlens, len(numerator))
    # In place: of a step's tokens each further copy is hundreds of megabytes.
    token = keep(numerator, counted).double().sub_(keep(denominator, counted)).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    sequence_of = sequence_index(bounds, token.device)
    num_sequences = len(bounds) - 1
    sums, counts = (sequence_sums(values, sequence_of, num_sequences) for values in (token, counted.double()))
    return LogRatios(token, sequence_of, sums, counts)


def _vetoed(ratios: LogRatios, counted: Tensor, veto_below: float) -> Tensor:
    """[T] bool: tokens of sequences with a counted token whose rho is below the bound; nothing is below 0."""
    if veto_below == 0:
        return torch.zeros_like(counted)
    return ratios.any_of_sequence(counted & (ratios.token.exp() < veto_below))


@register.rejection("none")
def _accept_all(ratios: LogRatios) -> Tensor:
    """Nothing is left out."""
    return torch.ones_like(ratios.token, dtype=torch.bool)


@register.rejection("token")
def _accept_tokens(ratios: LogRatios, rejection_low: float, rejection_high: float) -> Tensor:
    """Tokens with rho outside [low, high] leave."""
    return _within(ratios.token, rejection_low, rejection_high)


@register.rejection("sequence")
def _accept_sequences(ratios: LogRatios, rejection_low: float, rejection_high: float) -> Tensor:
    """Responses with prod rho outside [low, high] leave (MIS)."""
    return _within(ratios.product, rejection_low, rejection_high)


@register.rejection("geometric")
def _accept_geometric(ratios: LogRatios, rejection_low: float, rejection_high: float) -> Tensor:
    """Responses with exp(mean log rho) outside [low, high] leave."""
    return _within(ratios.sequence_mean(ratios.token), rejection_low, rejection_high)


@register.rejection("k2")
def _accept_k2(ratios: LogRatios, rejection_high: float) -> Tensor:
    """Responses with mean (log rho)^2 / 2 above high leave."""
    return ratios.sequence_mean(0.5 * ratios.token.square()) <= check_not_negative("rejection_high", rejection_high)


@register.rejection("k3")
def _accept_k3(ratios: LogRatios, rejection_high: float) -> Tensor:
    """Responses with mean (rho - 1 - log rho) above high leave."""
    distance = torch.expm1(ratios.token) - ratios.token
    return ratios.sequence_mean(distance) <= check_not_negative("rejection_high", rejection_high)


def _within(log_ratio: Tensor, low: float, high: float) -> Tensor:
    _check_interval("rejection", low, high)
    return (log_ratio.exp() >= low) & (log_ratio.exp() <= high)


@register.correction_weight("none")
def _no_weight(ratios: LogRatios) -> Tensor:
    """Samples count as if the trainer had drawn them."""
    return torch.ones_like(ratios.token)


@register.correction_weight("token", bounded=True)
def _token_weight(ratios: LogRatios) -> Tensor:
    """min(rho_t, max_weight): token TIS."""
    return ratios.token.exp()


@register.correction_weight("sequence", bounded=True, per_sequence=True)
def _sequence_weight(ratios: LogRatios) -> Tensor:
    """min(prod rho, max_weight): sequence TIS."""
    return ratios.product.exp()


@register.correction_weight("icepop")
def _icepop_weight(ratios: LogRatios, icepop_low: float, icepop_high: float) -> Tensor:
    """rho_t inside [icepop_low, icepop_high], else 0; the denominator stays."""
    _check_interval("icepop", icepop_low, icepop_high)
    rho = ratios.token.exp()
    return torch.where((rho >= icepop_low) & (rho <= icepop_high), rho, 0.0)


def _per_token(what: str, result: Tensor, ratios: LogRatios) -> Tensor:
    if not isinstance(result, Tensor) or result.shape != ratios.token.shape:
        raise ValueError(f"{what}: expected [{len(ratios.token)}], a number for each token, got {describe(result)}")
    return result


def _what_was_done(
    counted: Tensor, vetoed: Tensor, kept: Tensor, truncated: Tensor, raw: Tensor, ratios: LogRatios
) -> dict[str, float]:
    """Metrics of ``Correction`` from masks [T] bool and from the weights [T] before they are normalised."""
    num_counted, remaining = max(int(counted.sum()), 1), chosen(raw, kept)
    return {
        "masked_share": int((counted & (raw == 0)).sum()) / num_counted,
        "rejected_share": int((counted & ~kept).sum()) / num_counted,
        "vetoed_sequence_share": _sequence_share(counted & vetoed, ratios),
        "truncated_share": int(truncated.sum()) / max(len(remaining), 1),
        "weight_mean": float(remaining.mean()) if len(remaining) else 1.0,
        "weight_ess": effective_sample_size(remaining),
    }


def _mean_weight(weights: Tensor, kept: Tensor, ratios: LogRatios, per_sequence: bool) -> Tensor:
    """[] mean over the remaining tokens, or sequences; 1 where there is nothing to divide by."""
    if per_sequence:
        sums, counts = (
            sequence_sums(values, ratios.sequence_of, len(ratios.counts)) for values in (weights, kept.double())
        )
        mean = (sums[counts > 0] / counts[counts > 0]).sum() / (counts > 0).sum().clamp(min=1)
    else:
        mean = weights.sum() / kept.sum().clamp(min=1)
    return torch.where(mean > 0, mean, 1.0)


def _sequence_share(tokens: Tensor, ratios: LogRatios) -> float:
    """Share of the sequences with counted tokens that hold one of ``tokens`` [T] bool."""
    if not tokens.any():
        return 0.0
    hit = sequence_sums(tokens.double(), ratios.sequence_of, len(ratios.counts)) > 0
    return int(hit.sum()) / max(int((ratios.counts > 0).sum()), 1)


def _check_interval(name: str, low: float, high: float) -> None:
    if not 0.0 <= low <= high:
        raise ValueError(f"{name}_low, {name}_high: expected 0 <= low <= high, got {low!r} and {high!r}")


def _check_comparable(ratios: LogRatios, rollout_logprobs: Tensor, old_logprobs: Tensor) -> None:
    """Refuse NaN: it would pass every bound and reach the loss as a weight."""
    unknown = ratios.token.isnan()
    if unknown.any():
        unknown = unknown.nonzero()
        token = int(unknown[0])
        raise ValueError(
            f"rollout_logprobs, old_logprobs: expected numbers wherever the mask counts, got "
            f"{float(rollout_logprobs[token])} and {float(old_logprobs[token])} at token {token} "
            f"({len(unknown)} such tokens); take tokens without a log-prob out of the mask"
        )
