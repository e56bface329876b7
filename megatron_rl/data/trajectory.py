"""Prompts and the responses that grow from them, window by window and turn by turn.

A response is one text, or a dialogue: turns that the model generated, and messages of an environment between them.

Invariants: a trajectory's tokens are the engine's ids (a message's: the tokenizer's, once) and are never tokenised
again; segments are immutable and only appended; the turns of a dialogue are separated by messages; tokens after the
prompt, messages included, never exceed ``max_response_tokens``; a response is finished once the engine says stop, a
dialogue once its environment does, and both when the budget is used up.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from megatron_rl.config.derived import max_remainder_tokens
from megatron_rl.data.images import ImageRef

ENVIRONMENT = "environment"
"""Role of the messages that no model generated."""
POLICY = "policy"


@dataclass(frozen=True)
class Prompt:
    id: str
    token_ids: tuple[int, ...]
    """Expanded: an image stands as all its image tokens."""
    text: str = ""
    answer: str = ""
    source: str = ""
    """Source of the prompt, as file:line."""
    type: str = ""
    """Type or domain: mixtures, KL coefficients and rewards go by it."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of the row that its reward reads."""
    images: tuple[ImageRef, ...] = ()
    """In the order of their tokens."""
    chat_arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the chat template for the prompt, and for messages of an environment that follow it."""

    @cached_property
    def token_array(self) -> np.ndarray:
        """[prompt tokens] int32: ``token_ids``."""
        return read_only(self.token_ids, np.int32)

    def to_dict(self) -> dict[str, Any]:
        """For checkpoints: JSON-ready but for its array; what it holds is shared."""
        state = {one.name: getattr(self, one.name) for one in fields(self)}
        return state | {"token_ids": self.token_array, "images": [asdict(image) for image in self.images]}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """The inverse of ``to_dict``; a state written before prompts had images lacks them."""
        images = tuple(ImageRef(**dict(image, grid=tuple(image["grid"]))) for image in state.get("images", ()))
        token_ids = tuple(np.asarray(state["token_ids"]).tolist())
        return cls(**dict(state, token_ids=token_ids, images=images))


@dataclass(frozen=True, eq=False)
class Segment:
    """Tokens that one generation call returned for one trajectory, or one message of the environment."""

    token_ids: np.ndarray
    """[n] int32, read-only; made from any sequence of whole numbers."""
    rollout_logprobs: np.ndarray
    """mu: the engine's log-probs at sampling, [n] float32, read-only; zeros in a message."""
    weight_version: int
    finish_reason: str
    """stop (the turn ended by itself: a stop token or a stop string of the environment, which the last tokens are),
    length (it goes on, unless a budget is used up), abort (cut from outside, or new weights came) or message."""
    step: int
    """Training step that generated it."""
    turn: int = 0
    """The turn that it is part of; a message counts to the turn that it answers."""
    role: str = POLICY
    """Speaker: a role of the model (policy, verifier), or ``ENVIRONMENT``."""
    hot: bool = False
    """Sampled by FIRE at its own temperature; rollout_logprobs are those of that temperature."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", read_only(self.token_ids, np.int32))
        object.__setattr__(self, "rollout_logprobs", read_only(self.rollout_logprobs, np.float32))

    @property
    def generated(self) -> bool:
        return self.role != ENVIRONMENT


def read_only(values: Any, dtype: type) -> np.ndarray:
    """``values`` as an array of ``dtype`` that cannot be written to; what is one already is shared, not copied."""
    if type(values) is np.ndarray and values.dtype == dtype and not values.flags.writeable:
        return values
    array: np.ndarray = np.asarray(values, dtype=dtype).view()
    array.flags.writeable = False
    return array


def joined(parts: Iterable[np.ndarray], dtype: type) -> np.ndarray:
    """``parts`` back to back; no parts at all are an empty array."""
    return np.concatenate([np.zeros(0, dtype), *parts])


@dataclass(frozen=True, eq=False)
class TokenParts:
    """Token ids [n] int32 that lie in several arrays; numpy makes one of them.

    They need not be in one array until a reader needs them: a rollout worker has most of a response's parts already.
    """

    parts: Sequence[np.ndarray]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return joined(self.parts, np.int32).astype(dtype or np.int32, copy=False)


def message_segment(token_ids: Sequence[int], *, weight_version: int, step: int, turn: int) -> Segment:
    """A message of the environment, in answer to ``turn``."""
    logprobs = np.zeros(len(token_ids), np.float32)
    return Segment(np.array(token_ids, np.int32), logprobs, weight_version, "message", step, turn, ENVIRONMENT)


@dataclass(frozen=True)
class Turn:
    """The model's tokens between two messages, over all windows."""

    index: int
    segments: tuple[Segment, ...]
    start: int
    """Offset of the first token in the response; the others follow without a gap."""
    ended: bool
    """False: the next window goes on with it."""

    @property
    def role(self) -> str:
        return self.segments[0].role

    @property
    def token_ids(self) -> np.ndarray:
        """[num_tokens] int32"""
        return joined((segment.token_ids for segment in self.segments), np.int32)

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def finish_reason(self) -> str:
        """Finish reason of the last segment: ``stop``, or ``length`` and ``abort`` if a budget truncated it or it continues."""
        return self.segments[-1].finish_reason

    @property
    def last_step(self) -> int:
        """The step that generated its last token."""
        return self.segments[-1].step

    def tokens_of(self, step: int) -> int:
        """Number of its tokens that ``step`` generated."""
        return sum(len(segment.token_ids) for segment in self.segments if segment.step == step)


@dataclass(frozen=True)
class Score:
    """Outcome of a reward. ``value`` is None when the response could not be scored: masked and counted, never 0."""

    value: float | None
    detail: str = ""
    """For people who read samples: what was expected, which case failed."""
    error: str = ""
    """Why it could not be scored."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further numbers, which are averaged over a step."""


@dataclass(frozen=True)
class RouteRecord:
    """Experts to which the server sent a trajectory's tokens, prompt included, in its newest request."""

    step: int
    """The step of the request: its weights are those that all routes belong to."""
    routes: np.ndarray
    """[tokens of request and answer - 1, layers, k] int16, expert id + 1; 0: no record."""


@dataclass(eq=False)
class Trajectory:
    id: int
    prompt: Prompt
    group_id: int
    """Trajectories of one prompt share it."""
    sample_index: int
    max_response_tokens: int
    """Most tokens after the prompt, messages included."""
    segments: list[Segment] = field(default_factory=list)
    old_values: list[np.ndarray] = field(default_factory=list)
    """Critic values of the generated tokens: a float32 array per window, from the step that generated it."""
    token_rewards: list[np.ndarray] = field(default_factory=list)
    """Likewise rewards in addition to the outcome (KL penalty, lines); empty where there are none."""
    greedy: bool = False
    """The most likely token each time: a baseline for the responses of its group, which trains nothing."""
    first_window_tokens: int = 0
    """Most tokens of its first window, where that is to be shorter than the others; 0: as the others."""
    left_out: list[np.ndarray] = field(default_factory=list)
    """Offsets in the response, int32 per window, of generated tokens that did not train the policy; kept for the loss on
    positive examples."""
    reference_kl: list[float] = field(default_factory=list)
    """KL from the reference policy, summed over the generated tokens of each window that has trained."""
    score: Score | None = None
    """Score of the whole response or dialogue."""
    dialogue: bool = False
    """An environment answers the turns; it decides when the dialogue ends."""
    max_turn_tokens: int = 0
    """Most generated tokens of one turn; 0 means the rest of the budget."""
    next_role: str = POLICY
    """Speaker after the last message, or of the first turn."""
    env_done: bool = False
    """The environment ended the dialogue."""
    out_of_room: bool = False
    """The next message would have left no room for an answer: the dialogue is cut before it."""
    turn_grades: dict[int, Score] = field(default_factory=dict)
    """Score of each turn's graded text by the run's reward, keyed by turn."""
    turn_scores: dict[int, Score] = field(default_factory=dict)
    """Score that the last token of a turn receives, keyed by turn."""
    routes: RouteRecord | None = None
    """Only with routing replay R3. Not part of checkpoints: the next step's request replaces it."""

    @property
    def response_ids(self) -> np.ndarray:
        """[response tokens] int32: all tokens after the prompt, messages included."""
        return joined((segment.token_ids for segment in self.segments), np.int32)

    @property
    def num_response_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def num_generated_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments if segment.generated)

    @property
    def token_ids(self) -> np.ndarray:
        """[num_tokens] int32: prompt and response."""
        return joined(self.token_parts(), np.int32)

    def token_parts(self) -> list[np.ndarray]:
        """The pieces of ``token_ids``, for those who put many together at once."""
        return [self.prompt.token_array, *(segment.token_ids for segment in self.segments)]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and response."""
        return len(self.prompt.token_ids) + self.num_response_tokens

    @property
    def reward(self) -> float | None:
        """The score's value; None: it has no score yet, or could not be scored."""
        return None if self.score is None else self.score.value

    @property
    def ended_naturally(self) -> bool:
        """True if the response ended itself, not by a budget."""
        if self.dialogue:
            return self.env_done
        return bool(self.segments) and self.segments[-1].finish_reason == "stop"

    @property
    def finished(self) -> bool:
        return self.ended_naturally or self.out_of_room or self.num_response_tokens >= self.max_response_tokens

    def window_tokens(self, step: int | None) -> int:
        """Number of tokens that the model generated in ``step``; None: in all steps."""
        return sum(len(segment.token_ids) for segment in self.segments_from_step(step))

    def remaining_window(self, step: int, window_tokens: int) -> int:
        """Tokens that it may still grow by in ``step``, by its window alone; 0 when the window is full."""
        grown = self.window_tokens(step)
        is_first = self.num_generated_tokens == grown
        room = (self.first_window_tokens if is_first and self.first_window_tokens else window_tokens) - grown
        left = self.max_response_tokens - self.num_response_tokens
        return left if 0 < left - room <= max_remainder_tokens(window_tokens) else room

    def generated_mask(self) -> np.ndarray:
        """[response tokens] bool: the model's own tokens, not those of messages."""
        return self._per_token([segment.generated for segment in self.segments])

    def window_mask(self, step: int | None) -> np.ndarray:
        """[response tokens] bool: generated in ``step``; None: in any step."""
        return self._per_token([s.generated and step in (None, s.step) for s in self.segments])

    def hot_mask(self) -> np.ndarray:
        """[response tokens] bool: sampled hot (FIRE)."""
        return self._per_token([segment.hot for segment in self.segments])

    def rollout_logprobs(self) -> np.ndarray:
        """[response tokens] float32; 0 on the tokens of messages."""
        return joined((segment.rollout_logprobs for segment in self.segments), np.float32)

    def turns(self) -> list[Turn]:
        """The turns that have tokens, in order. Every one but the last has ended."""
        starts = np.cumsum([0, *(len(segment.token_ids) for segment in self.segments)])
        by_turn: dict[int, list[tuple[int, Segment]]] = {}
        for start, segment in zip(starts[:-1].tolist(), self.segments, strict=True):
            if segment.generated and len(segment.token_ids):
                by_turn.setdefault(segment.turn, []).append((start, segment))
        current, is_over = self.current_turn, self.turn_finished
        return [
            Turn(index, tuple(s for _, s in parts), start=parts[0][0], ended=index < current or is_over)
            for index, parts in by_turn.items()
        ]

    def turn_ended(self, step: int) -> list[Turn]:
        """The turns whose last token ``step`` generated."""
        return [turn for turn in self.turns() if turn.ended and turn.last_step == step]

    @property
    def current_turn(self) -> int:
        """Index of the turn that the model is in or begins next."""
        if not self.segments:
            return 0
        last = self.segments[-1]
        return last.turn if last.generated else last.turn + 1

    @property
    def num_turn_tokens(self) -> int:
        """Generated tokens of the current turn so far."""
        return sum(len(s.token_ids) for s in self._of_current_turn())

    @property
    def turn_finished(self) -> bool:
        """The current turn has tokens and gets no more."""
        last = next(reversed(list(self._of_current_turn())), None)
        if last is None:
            return False
        full = 0 < self.max_turn_tokens <= self.num_turn_tokens
        return last.finish_reason == "stop" or full or self.finished

    def _of_current_turn(self) -> Iterator[Segment]:
        turn = self.current_turn
        return (s for s in self.segments if s.generated and s.turn == turn)

    def segments_from_step(self, step: int | None) -> Iterator[Segment]:
        """Segments that the model generated in ``step``, or in any step if None."""
        return (segment for segment in self.segments if segment.generated and step in (None, segment.step))

    def _per_token(self, flags: list[bool]) -> np.ndarray:
        lengths = [len(segment.token_ids) for segment in self.segments]
        return np.repeat(np.array(flags, dtype=bool), np.array(lengths, dtype=np.int64))

    def frozen_copy(self) -> Self:
        """With the tokens of now, whatever grows later; signals and grades that are noted on one are on both."""
        return replace(self, segments=list(self.segments))

    def copy(self) -> Self:
        """A copy that later changes of this trajectory do not affect; immutable parts are shared."""
        lists: dict[str, Any] = {name: list(getattr(self, name)) for name in ("segments", *_BY_WINDOW)}
        return replace(self, **lists, turn_grades=dict(self.turn_grades), turn_scores=dict(self.turn_scores))

    def to_dict(self, prompt_index: int | None = None) -> dict[str, Any]:
        """A copy for checkpoints: JSON-ready but for its arrays, which are shared.

        ``prompt_index``: stands for the prompt, which is kept elsewhere.
        """
        state = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "routes"}
        state["prompt"] = self.prompt.to_dict() if prompt_index is None else prompt_index
        state["segments"] = [dict(vars(segment)) for segment in self.segments]
        for name in _BY_WINDOW:
            state[name] = list(state[name])
        state["score"] = None if self.score is None else asdict(self.score)
        for name in ("turn_grades", "turn_scores"):
            state[name] = {str(turn): asdict(score) for turn, score in state[name].items()}
        return state

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], prompts: Sequence[Prompt] = ()) -> Self:
        """The inverse of ``to_dict``, with arrays or with lists; what older states lack takes its default."""
        fields, prompt = dict(state), state["prompt"]
        fields["prompt"] = prompts[prompt] if isinstance(prompt, int) else Prompt.from_dict(prompt)
        fields["segments"] = [Segment(**segment) for segment in state["segments"]]
        kl = state.get("reference_kl", [])
        fields["reference_kl"] = [kl] if isinstance(kl, float) else list(kl)  # one sum over all windows, once
        for name, dtype in _ARRAYS_BY_WINDOW.items():
            parts = state.get(name, [])
            # Once all windows were one list of numbers.
            parts = parts if all(isinstance(part, np.ndarray | list) for part in parts) else [parts]
            fields[name] = [read_only(part, dtype) for part in parts]
        fields["score"] = Score(**state["score"]) if state["score"] else None
        for name in ("turn_grades", "turn_scores"):
            scores = state.get(name, {})
            fields[name] = {int(turn): Score(**score) for turn, score in scores.items()}
        return cls(**fields)


_ARRAYS_BY_WINDOW = {"old_values": np.float32, "token_rewards": np.float32, "left_out": np.int32}
_BY_WINDOW = (*_ARRAYS_BY_WINDOW, "reference_kl")
