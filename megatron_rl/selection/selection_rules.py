"""Selection rules as pure functions: map the scores of responses to one decision per prompt, in the same order.

Invariants: a decision depends only on the prompt's own scores and, for ``lowest``, on the other prompts of the same type;
the order of prompts and scores does not matter; equal scores are ordered by id; a prompt without scores is dropped with
that reason, never treated as 0.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_rl.config.schema import SelectionRule, SelectPromptsConfig

NO_SCORE = "none of its responses could be scored"
NO_ROW = "no response in the scores"
TOO_LONG = "longer than batch.max_prompt_tokens"
ABOVE_SHARE = "not in the lowest share of its type"
NEVER_SOLVED = "never solved"
SOLVED_TOO_OFTEN = "solved too often"
NO_SPREAD = "best response hardly better than the mean one"

_ROUNDING = 1e-9
"""Tolerance of comparing a spread with its threshold."""


@dataclass(frozen=True)
class PromptScores:
    id: str
    type: str
    scores: tuple[float, ...]
    num_unscored: int = 0
    """Number of unscored responses."""

    @property
    def mean(self) -> float | None:
        """Mean score, None without scores; summed exactly, so that the order of the scores does not matter."""
        return math.fsum(self.scores) / len(self.scores) if self.scores else None


@dataclass(frozen=True)
class PromptDecision:
    id: str
    type: str
    reason: str
    """Reason why the prompt is dropped; empty if it is kept."""
    num_scored: int
    num_unscored: int
    mean: float | None
    best: float | None
    z: float | None
    """Distance of the prompt's mean score from the type's mean, in standard deviations."""

    @property
    def kept(self) -> bool:
        return not self.reason


def select(prompts: Sequence[PromptScores], rule: SelectPromptsConfig, *, correct_from: float) -> list[PromptDecision]:
    """Decisions of the configured rule. ``correct_from``: smallest score of a solved response."""
    if rule.rule is SelectionRule.lowest:
        reasons = _lowest_reasons(prompts, keep_share=rule.keep_share)
    elif rule.rule is SelectionRule.pass_rate:
        reasons = _pass_rate_reasons(prompts, max_pass_rate=rule.max_pass_rate, correct_from=correct_from)
    else:
        reasons = _spread_reasons(prompts, min_spread=rule.min_spread)
    return [
        PromptDecision(
            id=prompt.id,
            type=prompt.type,
            reason=reason,
            num_scored=len(prompt.scores),
            num_unscored=prompt.num_unscored,
            mean=prompt.mean,
            best=max(prompt.scores, default=None),
            z=z,
        )
        for prompt, reason, z in zip(prompts, reasons, z_scores(prompts), strict=True)
    ]


def _lowest_reasons(prompts: Sequence[PromptScores], *, keep_share: float) -> list[str]:
    """Reason to drop each prompt; "" for the lowest ``keep_share`` of mean scores of each type (Pre-PPO, arXiv 2503.22230).

    The paper compares standardized scores. Plain scores have the same order within a type and no rounding errors, so
    they are compared instead. Of n scored prompts, floor(keep_share * n) are kept, at least one.
    """
    by_type: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for prompt in prompts:
        if prompt.mean is not None:
            by_type[prompt.type].append((prompt.mean, prompt.id))
    kept: set[tuple[str, str]] = set()
    for name, ranked in by_type.items():
        # A fraction of the decimal text, because 0.29 * 100 is less than 29 in floats.
        num_kept = max(1, math.floor(Fraction(repr(keep_share)) * len(ranked)))
        kept |= {(name, prompt_id) for _, prompt_id in sorted(ranked)[:num_kept]}
    return [_unscored(prompt) or ("" if (prompt.type, prompt.id) in kept else ABOVE_SHARE) for prompt in prompts]


def _pass_rate_reasons(prompts: Sequence[PromptScores], *, max_pass_rate: float, correct_from: float) -> list[str]:
    """Reason to drop each prompt; "" if 0 < solved fraction of its scored responses <= ``max_pass_rate`` (Seed1.5-VL)."""

    def reason(prompt: PromptScores) -> str:
        solved = sum(score >= correct_from for score in prompt.scores)
        if solved == 0:
            return NEVER_SOLVED
        return SOLVED_TOO_OFTEN if solved > Fraction(repr(max_pass_rate)) * len(prompt.scores) else ""

    return [_unscored(prompt) or reason(prompt) for prompt in prompts]


def _spread_reasons(prompts: Sequence[PromptScores], *, min_spread: float) -> list[str]:
    """Reason to drop each prompt; "" if max - mean of its scores >= ``min_spread`` (Seed1.5-VL, arXiv 2505.07062)."""

    def reason(prompt: PromptScores) -> str:
        if prompt.mean is None:
            return _unscored(prompt)
        return "" if max(prompt.scores) - prompt.mean >= min_spread - _ROUNDING else NO_SPREAD

    return [reason(prompt) for prompt in prompts]


def z_scores(prompts: Sequence[PromptScores]) -> list[float | None]:
    """(mean score - mean of the type) / standard deviation of the type, over the type's scored prompts.

    None for unscored prompts, 0 if all means of a type are equal.
    """
    means: dict[str, list[float]] = defaultdict(list)
    for prompt in prompts:
        if prompt.mean is not None:
            means[prompt.type].append(prompt.mean)
    moments: dict[str, tuple[float, float]] = {}
    for name, values in means.items():
        center = math.fsum(values) / len(values)
        moments[name] = center, math.sqrt(math.fsum((value - center) ** 2 for value in values) / len(values))

    def z(prompt: PromptScores) -> float | None:
        if prompt.mean is None:
            return None
        center, deviation = moments[prompt.type]
        return (prompt.mean - center) / deviation if deviation > 0 else 0.0

    return [z(prompt) for prompt in prompts]


def _unscored(prompt: PromptScores) -> str:
    if prompt.scores:
        return ""
    return NO_SCORE if prompt.num_unscored else NO_ROW


@dataclass(frozen=True)
class TypeSummary:
    """Statistics of the prompts of one type."""

    type: str
    num_prompts: int
    num_kept: int
    dropped: dict[str, int]
    """Maps reasons to numbers of dropped prompts, most frequent first."""
    mean_score: float | None
    """Mean of the prompts' mean scores."""
    mean_score_kept: float | None
    highest_kept: float | None
    """Largest mean score of a kept prompt."""
    num_responses: int
    num_unscored: int
    """Number of unscored responses."""
    num_kept_all_zero: int
    """Number of kept prompts without a response above 0: hard prompts, or broken ones."""


def summarize(verdicts: Sequence[PromptDecision]) -> list[TypeSummary]:
    """One entry per type, sorted by name."""
    by_type: dict[str, list[PromptDecision]] = defaultdict(list)
    for verdict in verdicts:
        by_type[verdict.type].append(verdict)
    return [_summary(name, members) for name, members in sorted(by_type.items())]


def _summary(name: str, verdicts: Sequence[PromptDecision]) -> TypeSummary:
    kept = [verdict for verdict in verdicts if verdict.kept]
    kept_means = [verdict.mean for verdict in kept if verdict.mean is not None]
    return TypeSummary(
        type=name,
        num_prompts=len(verdicts),
        num_kept=len(kept),
        dropped=dict(Counter(sorted(verdict.reason for verdict in verdicts if not verdict.kept)).most_common()),
        mean_score=_mean([verdict.mean for verdict in verdicts if verdict.mean is not None]),
        mean_score_kept=_mean(kept_means),
        highest_kept=max(kept_means, default=None),
        num_responses=sum(verdict.num_scored + verdict.num_unscored for verdict in verdicts),
        num_unscored=sum(verdict.num_unscored for verdict in verdicts),
        num_kept_all_zero=sum(verdict.best is not None and verdict.best <= 0 for verdict in kept),
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
