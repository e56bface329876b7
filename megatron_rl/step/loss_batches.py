"""Builds the inputs of both losses: the policy's batch of windows of training, and the critic's batch of whole responses. Pure.

Laws: the policy trains on tokens that have not trained. The critic trains on a finished response once, over all its windows,
with the values of the step in which each token trained the policy (T-PPO, arXiv 2506.15050). Unscored responses do not train.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from megatron_rl import algorithms
from megatron_rl.algorithms.sequences import repeat_per_sequence
from megatron_rl.config.schema import AlgorithmConfig, OldPolicy, Overlong
from megatron_rl.data.batch import ROUTES, PackedBatch, cu_seqlens_of
from megatron_rl.data.trajectory import Trajectory, joined
from megatron_rl.data.vision import ImageProcessor
from megatron_rl.step.packing import Stretches, pack, response_field
from megatron_rl.step.window_advantages import (
    SINGLE_RESPONSE,
    Advantages,
    ModelOutputs,
    ResponseRules,
    bootstrap_values,
    piece_tokens,
    response_pieces,
    terminal_rewards,
    window_pieces,
)


def policy_batch(
    trajectories: Sequence[Trajectory],
    batch: PackedBatch,
    old_logprobs: Tensor,
    advantages: Advantages,
    algorithm: AlgorithmConfig,
    kl_fields: Mapping[str, Tensor] | None = None,
    rules: ResponseRules = SINGLE_RESPONSE,
    *,
    is_partial: bool = False,
) -> tuple[PackedBatch, dict[str, float]]:
    """Build the policy loss's batch. Returns it with the correction's metrics of the mismatch between trainer and servers.

    The metrics are empty unless old log-probs are recomputed, and with ``is_partial``: the first update then computes the missing
    old log-probs (``config.schedule_facts.reuses_first_logprobs``), and the loss derives the weights from them.

    Fields: ``mask`` (the counted tokens), ``advantages``, ``old_logprobs``; ``weights`` with a correction, or
    ``rollout_logprobs``; ``kl_fields`` (``KlPenalty``) with a KL term in the loss, and then ``window``, the tokens whose
    divergence is measured; ``lm_mask`` with positive examples.
    """
    settings, in_window = algorithm.correction, batch.fields["mask"]
    fields = {"advantages": advantages.advantages, "old_logprobs": old_logprobs, **(kl_fields or {})}
    metrics: dict[str, float] = {}
    if is_partial:
        fields["mask"] = advantages.mask
        fields |= {"window": in_window} if kl_fields else {}
        fields |= {"rollout_logprobs": batch.fields["rollout_logprobs"]} if settings.weight != "none" else {}
    else:
        correction = _correction(batch, old_logprobs, advantages.mask, algorithm)
        fields["mask"] = correction.mask if correction.metrics["rejected_share"] else advantages.mask
        fields |= {"weights": correction.weights} if settings.weight != "none" else {}
        metrics = correction.metrics if settings.old_policy is OldPolicy.recomputed else {}
    if algorithm.positive_lm_coef:
        positive = _positive_mask(trajectories, algorithm, rules)
        fields["lm_mask"] = positive & (fields["mask"] | ~in_window)
        batch = replace(batch, spans=None)  # the positive mask also covers earlier windows
    return batch.only(ROUTES).with_fields(**fields), metrics


def mismatch(batch: PackedBatch, old_logprobs: Tensor, mask: Tensor, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Return the metrics that ``policy_batch`` omits with ``is_partial``, once all old log-probs are known.

    ``mask``: the policy batch's mask.
    """
    return _correction(batch, old_logprobs, mask, algorithm).metrics


def _correction(batch: PackedBatch, old_logprobs: Tensor, mask: Tensor, algorithm: AlgorithmConfig) -> algorithms.Correction:
    settings = algorithm.correction
    return algorithms.mismatch_correction(
        batch.fields["rollout_logprobs"],
        old_logprobs,
        mask,
        batch.cu_seqlens,
        weight=settings.weight,
        max_weight=settings.max_weight,
        icepop_low=settings.icepop_low,
        icepop_high=settings.icepop_high,
        rejection=settings.rejection,
        rejection_low=settings.rejection_low,
        rejection_high=settings.rejection_high,
        veto_below=settings.veto_below,
        normalize=settings.normalize,
        weight_options=settings.weight_options,
        rejection_options=settings.rejection_options,
    )


def response_batch(
    trajectories: Sequence[Trajectory],
    algorithm: AlgorithmConfig,
    rules: ResponseRules = SINGLE_RESPONSE,
    vision: ImageProcessor | None = None,
) -> PackedBatch | None:
    """Pack finished responses over all windows, with mask, returns (``lambda_critic``) and the values of each token's step.

    Returns None if every one is unscored.
    """
    trajectories = critic_responses(trajectories, algorithm)
    pieces = [p for row, t in enumerate(trajectories) for p in response_pieces(t, row, algorithm, rules)]
    useful = {p.row for p in pieces if p.scored}
    if not useful:
        return None
    if len(useful) < len(trajectories):
        return response_batch([trajectories[row] for row in sorted(useful)], algorithm, rules, vision)
    sizes = torch.tensor([p.num_tokens for p in pieces], dtype=torch.int64)
    cu_pieces = cu_seqlens_of(sizes)
    rewards = terminal_rewards(pieces, cu_pieces)
    if any(t.token_rewards for t in trajectories):
        rewards = rewards + _noted(t.token_rewards for t in trajectories)
    generated = Stretches(response_field([t.generated_mask() for t in trajectories], trajectories, bool))
    scored = repeat_per_sequence(torch.tensor([p.scored for p in pieces], dtype=torch.bool), sizes)
    old_values = _noted(t.old_values for t in trajectories)
    fields = {
        "returns": generated.on_mask(_critic_targets(rewards, old_values, cu_pieces, algorithm)),
        "old_values": generated.on_mask(old_values),
        "mask": generated.on_mask(scored),
    }
    return pack(trajectories, fields, vision)


def critic_responses(finished: Sequence[Trajectory], algorithm: AlgorithmConfig) -> list[Trajectory]:
    """Return the finished responses that a critic of whole responses trains on if they are scored."""
    filters = algorithm.overlong is Overlong.filter
    # A dialogue that failed before its first turn has no tokens.
    return [t for t in finished if t.num_generated_tokens and (t.ended_naturally or not filters)]


def window_critic_batch(
    trajectories: Sequence[Trajectory],
    batch: PackedBatch,
    signals: ModelOutputs,
    *,
    step: int,
    algorithm: AlgorithmConfig,
    rules: ResponseRules = SINGLE_RESPONSE,
) -> PackedBatch | None:
    """Same as ``response_batch``, but with the tokens that train the policy in ``step``, for a critic that trains with it.

    Targets are V + A^lambda_critic, with EGAE if a response continues (arXiv 2506.15050, eq. 6). Returns None if no token counts.
    """
    if signals.values is None:
        raise ValueError("window_critic_batch: expected values of the window's tokens, got none")
    window = Stretches(batch.fields["mask"])
    pieces = window_pieces(trajectories, step, algorithm, rules)
    sizes, cu_pieces, ended, rewards = piece_tokens(pieces, signals, window)
    values = window.within(signals.values)
    advantages = algorithms.egae(
        rewards,
        values,
        cu_pieces,
        ended,
        gamma=algorithm.gamma,
        lam=algorithm.lambda_critic,
        bootstrap=bootstrap_values(pieces, signals, algorithm),
    )
    filters = algorithm.overlong is Overlong.filter
    is_cut = [filters and trajectories[p.row].finished and not trajectories[p.row].ended_naturally for p in pieces]
    counts = torch.tensor([p.scored and not cut for p, cut in zip(pieces, is_cut, strict=True)], dtype=torch.bool)
    if not counts.any():
        return None
    fields = {
        "returns": window.on_mask(values + advantages),
        "old_values": window.on_mask(values),
        "mask": window.on_mask(repeat_per_sequence(counts, sizes)),
    }
    return batch.only().with_fields(**fields)


def _critic_targets(rewards: Tensor, old_values: Tensor, cu_pieces: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """Return [W] V + A^lambda of finished spans; Monte Carlo returns at lambda 1 (VC-PPO, arXiv 2503.01491)."""
    if algorithm.lambda_critic == 1.0:  # equal in exact arithmetic, and free of the values' rounding
        return algorithms.monte_carlo_returns(rewards, cu_pieces, gamma=algorithm.gamma)
    advantages = algorithms.gae(rewards, old_values, cu_pieces, gamma=algorithm.gamma, lam=algorithm.lambda_critic)
    return advantages + old_values


def store_model_outputs(trajectories: Sequence[Trajectory], batch: PackedBatch, signals: ModelOutputs, step: int) -> None:
    """Store each trajectory's new values (the reference point of the value clip) and token rewards for the critic."""
    windows, window = [t.training_tokens(step) for t in trajectories], Stretches(batch.fields["mask"])
    for name, values in (("old_values", signals.values), ("token_rewards", signals.token_rewards)):
        if values is not None:
            for trajectory, new_values in zip(trajectories, window.within(values).split(windows), strict=True):
                if len(new_values):  # a copy, because a view would keep the whole step's values in memory
                    getattr(trajectory, name).append(new_values.to(torch.float32).numpy().copy())


def store_untrained(trajectories: Sequence[Trajectory], batch: PackedBatch, trained: Tensor) -> None:
    """Store in each trajectory which of its new tokens the policy's mask ``trained`` [T] excludes."""
    rows = (batch.fields["mask"] & ~trained).split(batch.lengths.tolist())
    for trajectory, row in zip(trajectories, rows, strict=True):
        offsets = row.nonzero()[:, 0] - len(trajectory.prompt.token_ids)
        if len(offsets):
            trajectory.left_out.append(offsets.to(torch.int32).numpy())


def _noted(by_trajectory: Iterable[Sequence[np.ndarray]]) -> Tensor:
    """Concatenate the values stored in trajectories to [all generated tokens] float32."""
    return torch.from_numpy(joined(chain.from_iterable(by_trajectory), np.float32))


def _positive_mask(trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig, rules: ResponseRules) -> Tensor:
    """Return [T] bool: True on the tokens of finished responses with the full reward, over all windows, that the policy's masks included.

    In a dialogue with separately scored turns, the tokens of turns with the full score count. Responses that overlong=filter
    excludes are excluded with all their windows.
    """
    threshold, masks = algorithm.positive_lm_threshold, []
    for t in trajectories:
        mask = t.generated_mask() & (t.ended_naturally if algorithm.overlong is Overlong.filter else t.finished)
        mask[joined(t.left_out, np.int32)] = False
        is_positive = t.reward is not None and t.reward >= threshold
        if not rules.independent_turns and not t.turn_scores:
            masks.append(mask & is_positive)
            continue
        for turn in t.turns():
            score = t.turn_scores.get(turn.index)
            if score is not None:
                is_positive_turn = score.value is not None and score.value >= threshold
            else:
                is_positive_turn = is_positive and not rules.independent_turns
            mask[turn.start : turn.start + turn.num_tokens] &= is_positive_turn
        masks.append(mask)
    return response_field(masks, trajectories, bool)
