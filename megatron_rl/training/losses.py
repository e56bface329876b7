"""Combines the algorithms' loss terms into the objective of one update. Pure: no torch.distributed.

An objective divides each term by the term's own *global* denominator, a count over the whole mini-batch, all ranks
and micro-batches: the micro-batches' losses add up to the mini-batch's loss for every split.

    policy: sum(L) / n(policy) - entropy_coef * sum(H) / n(mask) + sum(kl_coef * KL) / n(policy)
            + positive_lm_coef * sum(-log pi) / n(lm_mask)
    critic: sum(L_value) / n(value), which is n(mask) with token means
    sft:    sum(-log pi) / n(mask)
    score:  sum(score_coefs * V after the last token), with coefficients that are already divided
    logprobs: sum(logprob_coefs * log pi), with coefficients that are already divided

with n(field) = ``denominators[field]``: tokens for mask and lm_mask; for policy and value the tokens or, with
sequence means, the responses that have tokens. Metrics keep sums and denominators apart; the engine adds them up.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl import algorithms
from megatron_rl.algorithms import register
from megatron_rl.algorithms.loss import Loss, mask_total, masked_sum
from megatron_rl.algorithms.policy_loss import lm_loss
from megatron_rl.algorithms.value_loss import value_loss
from megatron_rl.config.schema import AlgorithmConfig, KlPlace
from megatron_rl.data.batch import TEACHER_IDS, TEACHER_LOGPROBS, PackedBatch, moved, reply_spans

Metrics = Mapping[str, tuple[Tensor, Tensor]]
"""Name -> (sum, denominator), scalars over one micro-batch."""
LossFunction = Callable[[Mapping[str, Tensor], PackedBatch], tuple[Tensor, Metrics]]
"""(outputs, micro-batch) -> (loss divided by its global denominators, metrics).

``outputs`` of a policy: logprobs [T], entropy [T], and those of ``TEACHER_IDS`` [T, k] if the batch has any; of a critic: values [T],
final_values [N]; float32.
"""


def build(
    objective: str, algorithm: AlgorithmConfig, denominators: Mapping[str, float], *, is_own_old: bool = False
) -> LossFunction:
    """Loss function of the objective "policy", "critic", "sft", "score" or "logprobs".

    ``denominators``: n(field) in the module's docstring, over the whole mini-batch. ``is_own_old``: the old
    log-probs are those of the update's own forward pass, as in a policy's first update in a step.
    """
    if objective == "policy":
        return policy_objective(algorithm, denominators, is_own_old=is_own_old)
    if objective == "critic":
        return critic_objective(algorithm, denominators)
    if objective == "sft":
        return _sft_objective(denominators)
    if objective == "score":
        return _score_objective()
    if objective == "logprobs":
        return _logprobs_objective()
    raise ValueError(f"objective is 'policy', 'critic', 'sft', 'score' or 'logprobs', got {objective!r}")


def counted_tokens(batch: PackedBatch) -> dict[str, np.ndarray]:
    """Maps each mask of the batch to [N] int64: the number of tokens of each sequence that the mask counts."""
    firsts, ends = (border.tolist() for border in reply_spans(batch))
    masks = {name: batch.fields[name].numpy() for name in ("mask", "lm_mask") if name in batch.fields}
    return {
        name: np.array([np.count_nonzero(mask[first:end]) for first, end in zip(firsts, ends, strict=True)], np.int64)
        for name, mask in masks.items()
    }


def policy_denominators(
    batch: PackedBatch,
    algorithm: AlgorithmConfig,
    rows: Sequence[int] | None = None,
    counts: Mapping[str, np.ndarray] | None = None,
) -> dict[str, float]:
    """Denominators of ``policy_objective`` over a whole mini-batch: the sequences ``rows`` of ``batch``; None: all.

    ``counts``: ``counted_tokens`` of the batch, which is computed once for its mini-batches.
    """
    rows = list(range(batch.num_sequences) if rows is None else rows)
    counts = counted_tokens(batch) if counts is None else counts
    found = {name: float(of[rows].sum()) for name, of in counts.items()}
    return found | {"policy": _denominator(batch, rows, counts, *_aggregation(algorithm))}


def kept_tokens(algorithm: AlgorithmConfig, logprobs: Tensor, batch: PackedBatch, rows: Sequence[int]) -> Tensor:
    """[T] bool: the tokens that the policy loss's ``selects`` chooses in the mini-batch ``rows``; False in other sequences."""
    loss = register.POLICY_LOSSES.find(algorithm.policy_loss)
    assert loss.selects is not None
    in_rows = torch.zeros(batch.num_sequences, dtype=torch.bool)
    in_rows[list(rows)] = True
    of_rows = in_rows.repeat_interleave(batch.lengths)
    mask, options = batch.fields["mask"] & of_rows, dict(algorithm.policy_loss_options)
    return loss.selects(logprobs, batch.fields["old_logprobs"], batch.fields["advantages"], mask, **options)


def critic_denominators(
    batch: PackedBatch,
    algorithm: AlgorithmConfig,
    rows: Sequence[int] | None = None,
    counts: Mapping[str, np.ndarray] | None = None,
) -> dict[str, float]:
    """The denominators of ``critic_objective``, as ``policy_denominators``."""
    rows = list(range(batch.num_sequences) if rows is None else rows)
    counts = counted_tokens(batch) if counts is None else counts
    aggregation = algorithm.critic_aggregation, algorithm.critic_aggregation_options
    return {"mask": float(counts["mask"][rows].sum()), "value": _denominator(batch, rows, counts, *aggregation)}


def _denominator(
    batch: PackedBatch, rows: Sequence[int], counts: Mapping[str, np.ndarray], kind: str, options: Mapping[str, Any]
) -> float:
    """``algorithms.loss_denominator``, for the built-in aggregations from the counts alone."""
    if kind == "token_mean":
        return float(counts["mask"][rows].sum())
    if kind == "sequence_mean":
        return float((counts["mask"][rows] > 0).sum())
    chosen = batch.only("mask").select(rows)
    return algorithms.loss_denominator(chosen.fields["mask"], chosen.cu_seqlens, kind, options)


def _aggregation(algorithm: AlgorithmConfig) -> tuple[str, Mapping[str, Any]]:
    """Name and options of the aggregation in force: the loss's own, or the configured one."""
    averages = register.POLICY_LOSSES.find(algorithm.policy_loss).averages
    return (averages, {}) if averages else (algorithm.aggregation, algorithm.aggregation_options)


def policy_objective(
    algorithm: AlgorithmConfig, denominators: Mapping[str, float], *, is_own_old: bool = False
) -> LossFunction:
    """Reads the fields of ``step.loss_batches.policy_batch``: mask, old_logprobs, advantages, and those of the settings.

    ``is_own_old``: the outputs' own log-probs are the old log-probs. With the field ``rollout_logprobs`` the
    correction's weights are computed here. A mini-batch without positive examples (``denominators["lm_mask"]`` 0 or
    absent) has no LM term.
    """
    num_tokens, divisor = _positive(denominators, "mask"), _positive(denominators, "policy")
    num_lm_tokens = denominators.get("lm_mask", 0.0)
    with_lm = algorithm.positive_lm_coef != 0.0 and num_lm_tokens > 0
    policy_loss = register.POLICY_LOSSES.bind(algorithm.policy_loss, algorithm.policy_loss_options)

    def objective(outputs: Mapping[str, Tensor], batch: PackedBatch) -> tuple[Tensor, Metrics]:
        mask, logprobs = batch.fields["mask"], outputs["logprobs"]
        old_logprobs = logprobs.detach() if is_own_old else batch.fields["old_logprobs"]
        surrogate = _surrogate(algorithm, policy_loss, logprobs, old_logprobs, batch)
        entropy = Loss(masked_sum(outputs["entropy"], mask), mask_total(mask, logprobs.dtype))
        total = surrogate.sum / divisor
        metrics = {**surrogate.metrics, **_metric("policy_loss", surrogate), **_metric("entropy", entropy)}
        if algorithm.entropy_coef != 0.0:
            total = total - algorithm.entropy_coef * entropy.sum / num_tokens
        if algorithm.kl.place is KlPlace.loss:
            divergence = algorithms.kl_loss(
                logprobs,
                batch.fields["reference_logprobs"],
                mask,
                kind=algorithm.kl.estimator,
                coefficients=batch.fields["kl_coefs"],
                aggregation=_coefficients(_aggregation(algorithm), mask, batch),
                options=algorithm.kl.estimator_options,
                divergence=_divergence_from_teacher(outputs, batch),
            )
            total = total + divergence.sum / divisor
            metrics |= _metric("kl_loss", divergence)
        if with_lm:
            positive = lm_loss(logprobs, batch.fields["lm_mask"])
            total = total + algorithm.positive_lm_coef * positive.sum / num_lm_tokens
            metrics |= _metric("lm_loss", positive)
        return total, metrics

    return objective


def _surrogate(
    algorithm: AlgorithmConfig,
    policy_loss: Callable[..., Any],
    logprobs: Tensor,
    old_logprobs: Tensor,
    batch: PackedBatch,
) -> Loss:
    """The policy loss itself: ``policy_loss`` on the batch's fields, with weights and coefficients as configured."""
    mask, advantages, weights = batch.fields["mask"], batch.fields["advantages"], batch.fields.get("weights")
    coefficients = _coefficients(_aggregation(algorithm), mask, batch)
    if "rollout_logprobs" in batch.fields:
        settings = algorithm.correction
        weights = algorithms.importance_weights(
            batch.fields["rollout_logprobs"],
            old_logprobs,
            mask,
            batch.cu_seqlens,
            weight=settings.weight,
            max_weight=settings.max_weight,
            icepop_low=settings.icepop_low,
            icepop_high=settings.icepop_high,
        )
    if algorithm.correction.opsm_delta:  # masks whole responses; denominators remain those of all tokens
        kept = algorithms.off_policy_sequence_mask(
            old_logprobs, logprobs.detach(), advantages, mask, batch.cu_seqlens, delta=algorithm.correction.opsm_delta
        ).to(logprobs.dtype)
        weights = kept if weights is None else weights * kept
    loss = policy_loss(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        mask=mask,
        cu_seqlens=batch.cu_seqlens,
        weights=weights,
        coefficients=coefficients,
        kept=batch.fields.get("kept"),
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip or None,
    )
    if not isinstance(loss, Loss):
        raise ValueError(f"policy loss {algorithm.policy_loss!r}: expected an algorithms.Loss, got {loss!r}")
    return loss


def _divergence_from_teacher(outputs: Mapping[str, Tensor], batch: PackedBatch) -> Tensor | None:
    """[T] divergence over the teacher's most likely tokens and the remainder; None if the batch has no such tokens."""
    if TEACHER_LOGPROBS not in batch.fields:
        return None
    own = outputs[TEACHER_IDS]
    return algorithms.top_k_kl(own, batch.fields[TEACHER_LOGPROBS].to(own))


def _coefficients(aggregation: tuple[str, Mapping[str, Any]], mask: Tensor, batch: PackedBatch) -> Tensor | None:
    """[T] factor of each token's loss; None: 1."""
    name, options = aggregation
    if name == "token_mean":  # all are 1
        return None
    return algorithms.token_coefficients(mask, batch.cu_seqlens, name, options=options)


def critic_objective(algorithm: AlgorithmConfig, denominators: Mapping[str, float]) -> LossFunction:
    """Reads the fields mask, returns and old_values."""
    aggregation = algorithm.critic_aggregation, algorithm.critic_aggregation_options
    divisor = _positive(denominators, "mask" if algorithm.critic_aggregation == "token_mean" else "value")
    clipped = algorithm.value_clip_low != 0.0 or algorithm.value_clip_high != 0.0
    clip_low, clip_high = (algorithm.value_clip_low, algorithm.value_clip_high) if clipped else (None, None)

    def objective(outputs: Mapping[str, Tensor], batch: PackedBatch) -> tuple[Tensor, Metrics]:
        loss = value_loss(
            outputs["values"],
            batch.fields["old_values"],
            batch.fields["returns"],
            batch.fields["mask"],
            clip_low=clip_low,
            clip_high=clip_high,
            coefficients=_coefficients(aggregation, batch.fields["mask"], batch),
        )
        return loss.sum / divisor, {**loss.metrics, **_metric("value_loss", loss)}

    return objective


def _sft_objective(denominators: Mapping[str, float]) -> LossFunction:
    """Reads the field mask."""
    num_tokens = _positive(denominators, "mask")

    def objective(outputs: Mapping[str, Tensor], batch: PackedBatch) -> tuple[Tensor, Metrics]:
        loss = lm_loss(outputs["logprobs"], batch.fields["mask"])
        return loss.sum / num_tokens, _metric("lm_loss", loss)

    return objective


def _score_objective() -> LossFunction:
    """Reads the field score_coefs: on the last token of a sequence dL/ds of its score s (the value after that token).

    Any loss over whole sequences has the gradient of sum(dL/ds * s): score the sequences first without gradient,
    compute dL/ds where all scores are known (``algorithms.bradley_terry_coefficients``), then make this update.
    Sequences that are compared need not share a micro-batch or a rank. The value of this sum has no meaning, so
    there are no metrics.
    """

    def objective(outputs: Mapping[str, Tensor], batch: PackedBatch) -> tuple[Tensor, Metrics]:
        scores, coefs = outputs["final_values"], batch.fields["score_coefs"]
        last = moved((batch.cu_seqlens[1:] - 1).clamp(min=0), coefs.device)
        return (coefs[last].to(scores) * scores).sum(), {}

    return objective


def _logprobs_objective() -> LossFunction:
    """Reads the field logprob_coefs: dL/d(log pi) of each token, 0 outside the mask.

    As in ``_score_objective``, for a loss over the log-probs of whole sequences (``algorithms.dpo_coefficients``).
    """

    def objective(outputs: Mapping[str, Tensor], batch: PackedBatch) -> tuple[Tensor, Metrics]:
        return masked_sum(outputs["logprobs"], batch.fields["logprob_coefs"]), {}

    return objective


def _metric(name: str, loss: Loss) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (loss.sum.detach(), loss.denominator)}


def _positive(denominators: Mapping[str, float], name: str) -> float:
    count = denominators.get(name, 0.0)
    if count <= 0:
        raise ValueError(
            f"denominators[{name!r}] must be the number of tokens with {name} in the whole mini-batch, at least 1; "
            f"got {count}. Take no optimizer step on a mini-batch without such tokens"
        )
    return count
