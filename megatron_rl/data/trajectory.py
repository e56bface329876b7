"""Prompts and the responses that grow from them, window by window.

Invariants: a trajectory's tokens are the engine's ids and are never tokenised again; segments are immutable and only
appended; a trajectory is finished once the engine says stop or the response budget is used up.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Prompt:
    id: str
    token_ids: tuple[int, ...]
    text: str = ""
    answer: str = ""
    source: str = ""
    """Where the prompt comes from, as file:line."""
    type: str = ""
    """Type or domain: mixtures, KL coefficients and rewards go by it."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of the row that its reward reads."""


@dataclass(frozen=True)
class Segment:
    """What one generation call returned for one trajectory."""

    token_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    """mu: the engine's log-probs at sampling, one a token."""
    weight_version: int
    finish_reason: str
    """stop (the engine met a stop token, which is the last id), length, or abort (cut from outside)."""
    step: int
    """Training step that generated it."""


@dataclass(frozen=True)
class Score:
    """Outcome of a reward. ``value`` is None when the response could not be scored: masked and counted, never 0."""

    value: float | None
    detail: str = ""
    error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers beside the score that are averaged over a step."""


@dataclass
class Trajectory:
    id: int
    prompt: Prompt
    group_id: int
    """Trajectories of one prompt share it."""
    sample_index: int
    max_response_tokens: int
    segments: list[Segment] = field(default_factory=list)
    old_values: list[float] = field(default_factory=list)
    """Critic values of the response tokens, each from the step that generated it."""
    score: Score | None = None

    @property
    def response_ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def num_response_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt.token_ids, *self.response_ids]

    @property
    def stopped(self) -> bool:
        return bool(self.segments) and self.segments[-1].finish_reason == "stop"

    @property
    def finished(self) -> bool:
        return self.stopped or self.num_response_tokens >= self.max_response_tokens

    def window_tokens(self, step: int) -> int:
        """Tokens that ``step`` added; they are the last ones of the response."""
        return sum(len(segment.token_ids) for segment in self.segments if segment.step == step)

    def rollout_logprobs(self) -> np.ndarray:
        """[number of response tokens] float32."""
        return np.array([x for s in self.segments for x in s.rollout_logprobs], dtype=np.float32)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy, for checkpoints."""
        from dataclasses import asdict

        return asdict(self)

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> "Trajectory":
        prompt = dict(state["prompt"], token_ids=tuple(state["prompt"]["token_ids"]))
        segments = [
            Segment(**dict(s, token_ids=tuple(s["token_ids"]), rollout_logprobs=tuple(s["rollout_logprobs"])))
            for s in state["segments"]
        ]
        score = Score(**state["score"]) if state["score"] else None
        return cls(**dict(state, prompt=Prompt(**prompt), segments=segments, score=score))
