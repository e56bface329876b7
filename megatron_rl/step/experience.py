"""From trajectories to training batches: which tokens train what (T-PPO, papers 1.4). Pure.

Laws: the policy sees only tokens of this step's window; the critic sees a finished response once, over all its
windows; prompts and messages of an environment train nothing; what could not be scored trains nothing and is counted.
A response that is a dialogue with independent turns (PAG) is cut at the turns' borders: every turn is an episode.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_rl import algorithms
from megatron_rl.config.schema import (
    AdvantageKind,
    AlgorithmConfig,
    Bootstrap,
    CorrectionWeight,
    LambdaKind,
    Overlong,
)
from megatron_rl.data.batch import ROUTES, Images, PackedBatch, cu_seqlens_of
from megatron_rl.data.trajectory import Score, Trajectory, Turn
from megatron_rl.data.vision import Vision


@dataclass(frozen=True)
class ResponseRules:
    """How the responses of a run are built; the default is one response without an environment."""

    independent_turns: bool = False
    """No advantage or return crosses a turn's border."""
    masks_hot_tokens: bool = False
    """FIRE's hot tokens leave the policy loss."""


@dataclass(frozen=True)
class _Piece:
    """Generated tokens over which one advantage estimate runs: a response's window, or one turn's part of it."""

    row: int
    """Index of the trajectory."""
    num_tokens: int
    length: int
    """Generated tokens of the whole response or turn so far."""
    ended: bool
    outcome: float
    """Reward on the last token; 0 where the piece has not ended or could not be scored."""
    scored: bool
    role: str


def window_batch(trajectories: Sequence[Trajectory], step: int, vision: Vision | None = None) -> PackedBatch:
    """Prompt and response so far; ``mask`` is on the tokens that ``step`` generated, rollout_logprobs beside it.

    ``vision`` cuts the images of the prompts; every window of a response needs them.
    """
    rows = [t.token_ids for t in trajectories]
    mask = response_field([t.window_mask(step) for t in trajectories], trajectories, bool)
    logprobs = response_field([t.rollout_logprobs() for t in trajectories], trajectories, np.float32)
    fields = {"mask": mask, "rollout_logprobs": torch.where(mask, logprobs, 0.0)}
    return PackedBatch(_concatenate(rows), _cu_seqlens(rows), fields, _images(trajectories, vision))


def window_routes(trajectories: Sequence[Trajectory], step: int) -> Tensor | None:
    """[T, layers, k] int16: the experts that the engine chose in ``step`` (``data.batch.ROUTES``), 0 where it said nothing.

    None when no trajectory has a record of this step.
    """
    records = [t.routes.routes if t.routes is not None and t.routes.step == step else None for t in trajectories]
    shapes = {record.shape[1:] for record in records if record is not None}
    if not shapes:
        return None
    (shape,) = shapes
    rows = []
    for trajectory, record in zip(trajectories, records):
        routes = torch.zeros((len(trajectory.token_ids), *shape), dtype=torch.int16)
        if record is not None:
            routes[: len(record)] = torch.from_numpy(record)
        rows.append(routes)
    return torch.cat(rows)


def with_routes(batch: PackedBatch, routes: Tensor | None) -> PackedBatch:
    """The batch with the experts that the policy's passes over it are to follow; None: it chooses by itself."""
    return batch if routes is None else batch.with_fields(**{ROUTES: routes})


def _window_pieces(
    trajectories: Sequence[Trajectory], step: int, algorithm: AlgorithmConfig, rules: ResponseRules
) -> list[_Piece]:
    """The pieces of this step's window in the order of its tokens; a trajectory without new tokens has none."""
    pieces = []
    for row, trajectory in enumerate(trajectories):
        if not rules.independent_turns:
            if trajectory.window_tokens(step):
                pieces.append(_whole_piece(row, trajectory, trajectory.window_tokens(step), algorithm))
            continue
        new_tokens = Counter()
        for segment in trajectory.segments:
            new_tokens[segment.turn] += len(segment.token_ids) * (segment.generated and segment.step == step)
        pieces += [
            _turn_piece(row, trajectory, turn, n) for turn in trajectory.turns() if (n := new_tokens[turn.index])
        ]
    return pieces


def _response_pieces(trajectory: Trajectory, row: int, algorithm: AlgorithmConfig, rules: ResponseRules) -> list[_Piece]:
    """The pieces of a finished response over all its windows."""
    if not rules.independent_turns:
        return [_whole_piece(row, trajectory, trajectory.num_generated_tokens, algorithm)]
    return [_turn_piece(row, trajectory, turn, len(turn.token_ids)) for turn in trajectory.turns()]


def _shaped_outcome(trajectory: Trajectory, algorithm: AlgorithmConfig) -> float:
    """The score of a finished response and, at the end of the budget, DAPO's soft penalty (papers 4.2)."""
    outcome = float(trajectory.score.value)
    if algorithm.overlong is Overlong.soft:
        penalty = algorithms.soft_overlong_penalty(
            torch.tensor([float(trajectory.num_response_tokens)]),
            max_length=trajectory.max_response_tokens,
            buffer=algorithm.overlong_buffer_tokens,
        )
        outcome += algorithm.overlong_factor * float(penalty)
    return outcome


@dataclass(frozen=True)
class Advantages:
    advantages: Tensor
    """[T] normalised, on the window's tokens."""
    mask: Tensor
    """[T] bool, the tokens that the policy loss counts."""
    raw: Tensor
    """[T] before normalisation."""
    ended: Tensor
    """[T] bool, tokens of responses (or turns) that ended in this step."""


@dataclass(frozen=True)
class Signals:
    """What the models said about a window's batch; all [T] but final_values [N]."""

    values: Tensor | None = None
    """V(s_t); None without a critic."""
    final_values: Tensor | None = None
    """V after the last token of each trajectory."""
    token_rewards: Tensor | None = None
    """Rewards besides the outcome: a KL penalty, rewards of lines."""


def window_advantages(
    trajectories: Sequence[Trajectory],
    batch: PackedBatch,
    signals: Signals,
    *,
    step: int,
    window_tokens: int,
    algorithm: AlgorithmConfig,
    rules: ResponseRules = ResponseRules(),
) -> Advantages:
    """Advantages of this step's tokens: EGAE over the pieces, or the responses' outcomes against each other."""
    in_window = batch.fields["mask"]
    pieces = _window_pieces(trajectories, step, algorithm, rules)
    sizes = torch.tensor([p.num_tokens for p in pieces], dtype=torch.int64)
    cu_pieces, ended = cu_seqlens_of(sizes), torch.tensor([p.ended for p in pieces], dtype=torch.bool)
    rewards = _terminal_rewards(torch.tensor([p.outcome for p in pieces]), cu_pieces)
    if signals.token_rewards is not None:
        rewards = rewards + signals.token_rewards[in_window]
    counted = algorithms.boundary_mask(cu_pieces, ended, algorithm.ignore_boundary_tokens)
    counted &= torch.tensor([p.scored for p in pieces], dtype=torch.bool).repeat_interleave(sizes)
    counted &= ~_left_out(trajectories, algorithm, rules)[in_window]
    if algorithm.advantage is AdvantageKind.egae:
        final_values = None
        if algorithm.bootstrap is Bootstrap.critic:
            final_values = signals.final_values[torch.tensor([p.row for p in pieces], dtype=torch.int64)]
        advantages = algorithms.egae(
            rewards,
            signals.values[in_window],
            cu_pieces,
            ended,
            gamma=algorithm.gamma,
            lam=_lambda(pieces, ended, window_tokens, algorithm),
            bootstrap=final_values,
        )
    else:
        groups = torch.tensor([trajectories[p.row].group_id for p in pieces], dtype=torch.int64)
        scored = torch.tensor([p.scored for p in pieces], dtype=torch.bool)
        advantages = compared_advantages(rewards, cu_pieces, groups, scored, algorithm.advantage)
    if algorithm.normalize_by_role:
        roles = sorted({p.role for p in pieces})
        role_ids = torch.tensor([roles.index(p.role) for p in pieces]).repeat_interleave(sizes)
        normalized = algorithms.role_normalize(advantages, counted, role_ids, clamp=algorithm.advantage_clamp)
    else:
        normalized = algorithms.normalize_advantages(
            advantages, counted, kind=algorithm.normalization.value, clamp=algorithm.advantage_clamp
        )
    return Advantages(
        advantages=_scatter(normalized, in_window),
        mask=_scatter(counted, in_window),
        raw=_scatter(advantages, in_window),
        ended=_scatter(ended.repeat_interleave(sizes), in_window),
    )


def compared_advantages(
    rewards: Tensor, cu_pieces: Tensor, groups: Tensor, scored: Tensor, kind: AdvantageKind
) -> Tensor:
    """Advantages without a critic: a response's summed reward against those of its group, on all its tokens [W]."""
    sizes = cu_pieces[1:] - cu_pieces[:-1]
    rows = torch.arange(len(sizes)).repeat_interleave(sizes)
    outcomes = torch.zeros(len(sizes)).index_add_(0, rows, rewards)
    if kind is AdvantageKind.rloo:
        return algorithms.rloo_advantages(outcomes, groups, valid=scored)[rows]
    if kind in (AdvantageKind.group, AdvantageKind.group_mean):
        divide = kind is AdvantageKind.group
        return algorithms.group_advantages(outcomes, groups, valid=scored, scale_by_std=divide)[rows]
    mask = scored.repeat_interleave(sizes)
    baseline_groups = groups if kind is AdvantageKind.reinforce_pp_baseline else None
    return algorithms.reinforce_pp_advantages(rewards, mask, cu_pieces, group_ids=baseline_groups)


def policy_batch(
    trajectories: Sequence[Trajectory],
    batch: PackedBatch,
    old_logprobs: Tensor,
    advantages: Advantages,
    algorithm: AlgorithmConfig,
    *,
    reference_logprobs: Tensor | None = None,
    kl_coefs: Tensor | None = None,
) -> tuple[PackedBatch, dict[str, float]]:
    """What the policy loss reads, and how far trainer and engine are apart (the correction's metrics).

    Fields: ``mask`` (the counted tokens), ``advantages``, ``old_logprobs``; ``weights`` with a correction;
    ``reference_logprobs`` and ``kl_coefs`` [T] with a KL term in the loss; ``lm_mask`` with positive examples.
    """
    settings = algorithm.correction
    correction = algorithms.mismatch_correction(
        batch.fields["rollout_logprobs"],
        old_logprobs,
        advantages.mask,
        batch.cu_seqlens,
        weight=settings.weight.value,
        max_weight=settings.max_weight,
        icepop_low=settings.icepop_low,
        icepop_high=settings.icepop_high,
        rejection=settings.rejection.value,
        rejection_low=settings.rejection_low,
        rejection_high=settings.rejection_high,
        veto_below=settings.veto_below,
        normalize=settings.normalize,
    )
    fields = {"mask": correction.mask, "advantages": advantages.advantages, "old_logprobs": old_logprobs}
    if settings.weight is not CorrectionWeight.none:
        fields["weights"] = correction.weights
    if reference_logprobs is not None:
        fields |= {"reference_logprobs": reference_logprobs, "kl_coefs": kl_coefs}
    if algorithm.positive_lm_coef:
        fields["lm_mask"] = _positive_mask(trajectories, algorithm.positive_lm_threshold)
    return batch.only(ROUTES).with_fields(**fields), correction.metrics


def response_batch(
    trajectories: Sequence[Trajectory],
    algorithm: AlgorithmConfig,
    rules: ResponseRules = ResponseRules(),
    vision: Vision | None = None,
) -> PackedBatch | None:
    """Finished responses over all windows: mask, Monte-Carlo returns and the values of generation time.

    None when none of them could be scored.
    """
    trajectories = [t for t in trajectories if algorithm.overlong is not Overlong.filter or t.stopped]
    pieces = [p for row, t in enumerate(trajectories) for p in _response_pieces(t, row, algorithm, rules)]
    useful = {p.row for p in pieces if p.scored}
    if not useful:
        return None
    if len(useful) < len(trajectories):
        return response_batch([trajectories[row] for row in sorted(useful)], algorithm, rules, vision)
    sizes = torch.tensor([p.num_tokens for p in pieces], dtype=torch.int64)
    cu_pieces = cu_seqlens_of(sizes)
    rewards = _terminal_rewards(torch.tensor([p.outcome for p in pieces]), cu_pieces)
    if any(t.token_rewards for t in trajectories):
        rewards = rewards + torch.tensor([r for t in trajectories for r in t.token_rewards])
    rows = [t.token_ids for t in trajectories]
    generated = response_field([t.generated_mask() for t in trajectories], trajectories, bool)
    scored = torch.tensor([p.scored for p in pieces], dtype=torch.bool).repeat_interleave(sizes)
    fields = {name: torch.zeros(len(generated)) for name in ("returns", "old_values")}
    fields["mask"] = _scatter(scored, generated)
    fields["returns"][generated] = algorithms.monte_carlo_returns(rewards, cu_pieces, gamma=algorithm.gamma)
    fields["old_values"][generated] = torch.tensor([v for t in trajectories for v in t.old_values])
    return PackedBatch(_concatenate(rows), _cu_seqlens(rows), fields, _images(trajectories, vision))


def keep_signals(trajectories: Sequence[Trajectory], batch: PackedBatch, signals: Signals, step: int) -> None:
    """Each trajectory remembers its new tokens' values (the anchor of the value clip) and rewards for the critic."""
    windows = [t.window_tokens(step) for t in trajectories]
    for name, values in (("old_values", signals.values), ("token_rewards", signals.token_rewards)):
        if values is not None:
            for trajectory, new_values in zip(trajectories, values[batch.fields["mask"]].split(windows)):
                getattr(trajectory, name).extend(new_values.tolist())


def per_sequence_coefs(trajectories: Sequence[Trajectory], batch: PackedBatch, coefs: dict[str, float], default: float):
    """[T] float32: each prompt's coefficient by its type, on all its tokens."""
    by_row = torch.tensor([coefs.get(t.prompt.type, default) for t in trajectories], dtype=torch.float32)
    return by_row.repeat_interleave(batch.lengths)


def _positive_mask(trajectories: Sequence[Trajectory], threshold: float) -> Tensor:
    """[T] bool: generated tokens, all windows, of finished responses with a reward of at least ``threshold``."""
    positive = [t.finished and _is_scored(t.score) and t.score.value >= threshold for t in trajectories]
    masks = [t.generated_mask() & yes for t, yes in zip(trajectories, positive)]
    return response_field(masks, trajectories, bool)


def tail_mask(lengths: Tensor, tails: Tensor) -> Tensor:
    """[T] bool: the last tails[n] tokens of each of N sequences of lengths [N]."""
    ends = lengths.cumsum(0).repeat_interleave(lengths)
    return torch.arange(int(lengths.sum())) >= ends - tails.repeat_interleave(lengths)


def _terminal_rewards(outcomes: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] float32, zero but for outcomes [N] on the last token of each non-empty sequence."""
    rewards = torch.zeros(int(cu_seqlens[-1]))
    nonempty = cu_seqlens[1:] > cu_seqlens[:-1]
    rewards[cu_seqlens[1:][nonempty] - 1] = outcomes[nonempty].to(torch.float32)
    return rewards


def _is_scored(score: Score | None) -> bool:
    return score is not None and score.value is not None


def _whole_piece(row: int, trajectory: Trajectory, num_tokens: int, algorithm: AlgorithmConfig) -> _Piece:
    ended = trajectory.finished
    scored = not ended or _is_scored(trajectory.score)
    outcome = _shaped_outcome(trajectory, algorithm) if ended and scored else 0.0
    return _Piece(row, num_tokens, trajectory.num_generated_tokens, ended, outcome, scored, "policy")


def _turn_piece(row: int, trajectory: Trajectory, turn: Turn, num_tokens: int) -> _Piece:
    score = trajectory.turn_scores.get(turn.index)
    ended = turn.ended or trajectory.finished
    scored = score is None or score.value is not None
    outcome = float(score.value) if ended and _is_scored(score) else 0.0
    return _Piece(row, num_tokens, len(turn.token_ids), ended, outcome, scored, turn.role)


def _left_out(trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig, rules: ResponseRules) -> Tensor:
    """[T] bool: tokens that the policy loss leaves out although they were generated in this step."""
    masks = []
    for t in trajectories:
        cut = algorithm.overlong is Overlong.filter and t.finished and not t.stopped
        masks.append(t.hot_mask() & rules.masks_hot_tokens | np.full(t.num_response_tokens, cut))
    return response_field(masks, trajectories, bool)


def _lambda(pieces: Sequence[_Piece], ended: Tensor, window_tokens: int, algorithm: AlgorithmConfig) -> float | Tensor:
    if algorithm.lambda_policy is LambdaKind.constant:
        return algorithm.lambda_value
    lengths = torch.tensor([p.length for p in pieces], dtype=torch.float32).clamp(min=1)
    # An unfinished response is expected to go on for about half a window (papers 1.4).
    lengths = lengths + (~ended) * (window_tokens // 2)
    return algorithms.length_adaptive_lambda(lengths, alpha=algorithm.lambda_alpha, floor=algorithm.lambda_value)


def response_field(parts: Sequence[np.ndarray], trajectories: Sequence[Trajectory], dtype: type = np.float32) -> Tensor:
    """[T]: one array over each response's tokens, zeros on the prompts."""
    rows = []
    for part, trajectory in zip(parts, trajectories, strict=True):
        rows += [np.zeros(len(trajectory.prompt.token_ids), dtype), part.astype(dtype, copy=False)]
    return torch.from_numpy(np.concatenate(rows))


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    full = torch.zeros(len(mask), dtype=values.dtype)
    full[mask] = values
    return full


def _cu_seqlens(rows: Sequence[Sequence[int]]) -> Tensor:
    return cu_seqlens_of(torch.tensor([len(row) for row in rows], dtype=torch.int64))


def _images(trajectories: Sequence[Trajectory], vision: Vision | None) -> Images | None:
    return None if vision is None else vision.batch([t.prompt.images for t in trajectories])


def _concatenate(rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(row, dtype=np.int64) for row in rows]))
