"""Prompts and the responses that grow from them, window by window and turn by turn.

A response is one text, or a dialogue: turns that the model generated, and messages of an environment between the turns.

Invariants: a trajectory's tokens are the server's ids (a message's tokens: the tokenizer's) and are never tokenized
again; segments are immutable and only appended; messages separate the turns of a dialogue; tokens after the prompt,
messages included, never exceed ``max_response_tokens``; a response is finished when the server stops it, a dialogue
when its environment ends it, and both when the budget is used up.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from megatron_rl.config.derived import max_remainder_tokens
from megatron_rl.data.images import ImageRef

ENVIRONMENT = "environment"
"""Role of messages, which no model generated."""
POLICY = "policy"


@dataclass(frozen=True)
class Prompt:
    id: str
    token_ids: tuple[int, ...]
    """Prompt tokens, in which each image is expanded to all its image tokens."""
    text: str = ""
    answer: str = ""
    source: str = ""
    """Source of the prompt, as file:line."""
    type: str = ""
    """Type or domain, which selects mixture weights, KL coefficients and rewards."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of the row that its reward reads."""
    images: tuple[ImageRef, ...] = ()
    """Images in the order of their tokens."""
    chat_arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the chat template for the prompt, and for messages of an environment that follow it."""

    @cached_property
    def token_array(self) -> np.ndarray:
        """[prompt tokens] int32: ``token_ids``."""
        return read_only(self.token_ids, np.int32)

    def to_dict(self) -> dict[str, Any]:
        """State for checkpoints, as JSON values and one array; values are shared."""
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
    """mu: the server's log-probs at sampling, [n] float32, read-only; zeros in a message."""
    weight_version: int
    finish_reason: str
    """stop (the last tokens are a stop token or a stop string of the environment), length (the turn continues,
    unless a budget is used up), abort (the request was aborted, or new weights were published) or message."""
    step: int
    """Training step that generated the segment."""
    turn: int = 0
    """Turn of the segment; a message belongs to the turn that it answers."""
    role: str = POLICY
    """Speaker: a role of the model (policy, verifier), or ``ENVIRONMENT``."""
    hot: bool = False
    """True for a token that FIRE sampled at its own temperature; rollout_logprobs are those of that temperature."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", read_only(self.token_ids, np.int32))
        object.__setattr__(self, "rollout_logprobs", read_only(self.rollout_logprobs, np.float32))

    @property
    def generated(self) -> bool:
        return self.role != ENVIRONMENT


def read_only(values: Any, dtype: type) -> np.ndarray:
    """``values`` as a read-only array of ``dtype``; an array that is one already is shared, not copied."""
    if type(values) is np.ndarray and values.dtype == dtype and not values.flags.writeable:
        return values
    array: np.ndarray = np.asarray(values, dtype=dtype).view()
    array.flags.writeable = False
    return array


def joined(parts: Iterable[np.ndarray], dtype: type) -> np.ndarray:
    """``parts`` concatenated; without parts an empty array."""
    return np.concatenate([np.zeros(0, dtype), *parts])


@dataclass(frozen=True, eq=False)
class TokenParts:
    """Token ids [n] int32 in several arrays, which numpy joins when a reader needs them.

    A rollout worker has most parts of a response already, so the parts are sent as addresses.
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
    """False if the next window continues the turn."""

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
        """Finish reason of the last segment (``Segment.finish_reason``): ``stop``, ``length`` or ``abort``."""
        return self.segments[-1].finish_reason

    @property
    def last_step(self) -> int:
        """Step that generated the turn's last token."""
        return self.segments[-1].step


@dataclass(frozen=True)
class Score:
    """Outcome of a reward. ``value`` is None when the response could not be scored: masked and counted, never 0."""

    value: float | None
    detail: str = ""
    """Explanation for readers of samples: the expected result, the failed case."""
    error: str = ""
    """Reason why the response could not be scored."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further metrics, which are averaged over a step."""


@dataclass(eq=False)
class Trajectory:
    id: int
    prompt: Prompt
    group_id: int
    """Id of the group, the trajectories of one prompt."""
    sample_index: int
    max_response_tokens: int
    """Maximum number of tokens after the prompt, messages included."""
    segments: list[Segment] = field(default_factory=list)
    old_values: list[np.ndarray] = field(default_factory=list)
    """Critic values of the generated tokens: a float32 array per window of training, from the step of training."""
    token_rewards: list[np.ndarray] = field(default_factory=list)
    """Token rewards per window, in addition to the outcome (KL penalty, lines); empty if there are none."""
    greedy: bool = False
    """True for a greedy response, a baseline for its group that does not train."""
    first_window_tokens: int = 0
    """Maximum number of tokens of the first window, if it is shorter than the others; 0: as the others."""
    left_out: list[np.ndarray] = field(default_factory=list)
    """Offsets in the response, int32 per window, of generated tokens that did not train the policy; kept for the
    loss on positive examples."""
    deferred_steps: tuple[int, ...] = ()
    """Steps whose tokens train in a later step (``schedule.training_window_tokens``)."""
    reference_kl: list[float] = field(default_factory=list)
    """KL from the reference policy, summed over the generated tokens of each window that has trained."""
    score: Score | None = None
    """Score of the whole response or dialogue."""
    dialogue: bool = False
    """True if an environment answers the turns and ends the dialogue."""
    max_turn_tokens: int = 0
    """Maximum number of generated tokens of one turn; 0: the rest of the budget."""
    turn_limit: int = 0
    """A smaller maximum of the current turn alone; 0: none."""
    turn_stops: tuple[str, ...] = ()
    """Strings that end the current turn, besides those of the environment."""
    next_role: str = POLICY
    """Speaker after the last message, or of the first turn."""
    env_done: bool = False
    """True once the environment has ended the dialogue."""
    out_of_room: bool = False
    """True if the next message would have left no tokens for a turn: the dialogue is truncated before the message."""
    opened: bool = False
    """True once the environment has written the prompt (``Environment.opens``)."""
    parent: int = -1
    """Id of the trajectory whose episode this further row belongs to; -1: the row is its episode's first."""
    graded_text: str | None = None
    """Text that the run's reward scores, if the environment named one at the end."""
    turn_grades: dict[int, Score] = field(default_factory=dict)
    """Score of each turn's graded text by the run's reward, keyed by turn."""
    turn_scores: dict[int, Score] = field(default_factory=dict)
    """Score that the last token of a turn receives, keyed by turn."""
    waits: dict[int, tuple[int, float]] = field(default_factory=dict)
    """(step in which it joined, seconds of its call) of the environment's reply to each turn, if the environment may wait; turn -1:
    the reply that opened the dialogue. Measured in this run, so not part of checkpoints."""
    routes: tuple[int, np.ndarray] | None = None
    """(step, routes) of the newest request, only with routing replay R3: the experts to which the server sent the
    tokens, [tokens of request and answer - 1, layers, k] int16, expert id + 1; 0: no record. The step's weights
    chose all routes. Not part of checkpoints: the next step's request replaces the routes."""

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
        """The arrays of which ``token_ids`` consists, without a copy."""
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

    def window_tokens(self, step: int) -> int:
        """Number of tokens that the model generated in ``step``."""
        return sum(len(segment.token_ids) for segment in self.segments if segment.generated and segment.step == step)

    def first_training_step(self, step: int) -> int:
        """First of the steps whose tokens train in ``step``: the deferred steps right before it, and itself."""
        first = step
        for segment in reversed(self.segments):
            if segment.generated and segment.step < step:
                if segment.step not in self.deferred_steps:
                    break
                first = segment.step
        return first

    def training_segments(self, step: int) -> list[Segment]:
        """Generated segments that train in ``step``."""
        first = self.first_training_step(step)
        return [segment for segment in self.segments if segment.generated and first <= segment.step <= step]

    def training_tokens(self, step: int) -> int:
        """Number of tokens of the window of training in ``step``: all that have not trained before."""
        return sum(len(segment.token_ids) for segment in self.training_segments(step))

    def remaining_window(self, step: int, window_tokens: int) -> int:
        """Number of tokens that the window of ``step`` still allows; 0 when the window is full."""
        grown = self.window_tokens(step)
        is_first = self.num_generated_tokens == grown
        room = (self.first_window_tokens if is_first and self.first_window_tokens else window_tokens) - grown
        left = self.max_response_tokens - self.num_response_tokens
        return left if 0 < left - room <= max_remainder_tokens(window_tokens) else room

    def generated_mask(self) -> np.ndarray:
        """[response tokens] bool: the model's own tokens, not those of messages."""
        return self._per_token([segment.generated for segment in self.segments])

    def hot_mask(self) -> np.ndarray:
        """[response tokens] bool: sampled hot (FIRE)."""
        return self._per_token([segment.hot for segment in self.segments])

    def rollout_logprobs(self) -> np.ndarray:
        """[response tokens] float32; 0 on the tokens of messages."""
        return joined((segment.rollout_logprobs for segment in self.segments), np.float32)

    def turns(self) -> list[Turn]:
        """Turns with tokens, in order; every turn but the last has ended."""
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
        """Ended turns whose last token ``step`` generated."""
        return [turn for turn in self.turns() if turn.ended and turn.last_step == step]

    @property
    def current_turn(self) -> int:
        """Index of the turn that the model generates now or next."""
        if not self.segments:
            return 0
        last = self.segments[-1]
        return last.turn if last.generated else last.turn + 1

    @property
    def num_turn_tokens(self) -> int:
        """Generated tokens of the current turn so far."""
        return sum(len(s.token_ids) for s in self._of_current_turn())

    @property
    def turn_budget(self) -> int:
        """Maximum number of generated tokens of the current turn; 0: the rest of the budget."""
        return min(filter(None, (self.turn_limit, self.max_turn_tokens)), default=0)

    @property
    def turn_finished(self) -> bool:
        """True if the current turn has tokens and gets no more tokens."""
        last = next(reversed(list(self._of_current_turn())), None)
        if last is None:
            return False
        full = 0 < self.turn_budget <= self.num_turn_tokens
        return last.finish_reason == "stop" or full or self.finished

    def _of_current_turn(self) -> Iterator[Segment]:
        turn = self.current_turn
        return (s for s in self.segments if s.generated and s.turn == turn)

    def _per_token(self, flags: list[bool]) -> np.ndarray:
        lengths = [len(segment.token_ids) for segment in self.segments]
        return np.repeat(np.array(flags, dtype=bool), np.array(lengths, dtype=np.int64))

    def further_row(self, id: int, token_ids: Sequence[int]) -> Self:
        """Another row of this trajectory's episode. Its prompt does not train: what it shares with this row trains here."""
        most = len(self.prompt.token_ids) + self.max_response_tokens
        return type(self)(
            id,
            replace(self.prompt, token_ids=tuple(token_ids)),
            self.group_id,
            self.sample_index,
            max(1, most - len(token_ids)),
            dialogue=True,
            max_turn_tokens=self.max_turn_tokens,
            next_role=self.next_role,
            opened=True,
            parent=self.id,
        )

    def as_of(self, step: int) -> Self:
        """This trajectory if it has finished in ``step`` or before, else a copy with the segments up to ``step``.

        Lists of values and the scores by turn are shared with the copy; ``score`` and new segments are not.
        """
        is_later = bool(self.segments) and self.segments[-1].step > step
        if self.finished and not is_later:
            return self
        segments = [segment for segment in self.segments if segment.step <= step]
        return replace(
            self, segments=segments, env_done=self.env_done and not is_later, out_of_room=self.out_of_room and not is_later
        )

    def copy(self) -> Self:
        """A copy that later changes of this trajectory do not affect; immutable parts are shared."""
        lists: dict[str, Any] = {name: list(getattr(self, name)) for name in ("segments", *_BY_WINDOW)}
        return replace(self, **lists, turn_grades=dict(self.turn_grades), turn_scores=dict(self.turn_scores), waits=dict(self.waits))

    def to_dict(self, prompt_index: int | None = None) -> dict[str, Any]:
        """State for checkpoints: JSON values, and arrays that are shared with this trajectory.

        ``prompt_index``: stored instead of the prompt, for a caller that stores the prompts separately.
        """
        state = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("routes", "waits")}
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
        """The inverse of ``to_dict``. ``prompts``: prompts to which a state refers by index.

        Per-token fields may be arrays or lists. Fields that older states lack get their defaults.
        """
        fields, prompt = dict(state), state["prompt"]
        fields["prompt"] = prompts[prompt] if isinstance(prompt, int) else Prompt.from_dict(prompt)
        fields["segments"] = [Segment(**segment) for segment in state["segments"]]
        kl = state.get("reference_kl", [])
        fields["reference_kl"] = [kl] if isinstance(kl, float) else list(kl)  # one sum over all windows, once
        for name, dtype in _ARRAYS_BY_WINDOW.items():
            parts = state.get(name, [])
            # In older states all windows are one list of numbers.
            parts = parts if all(isinstance(part, np.ndarray | list) for part in parts) else [parts]
            fields[name] = [read_only(part, dtype) for part in parts]
        # An older state tells by its values which steps have trained: all with tokens, or none.
        deferred = () if state.get("old_values") else (segment.step for segment in fields["segments"])
        fields["deferred_steps"] = tuple(state.get("deferred_steps", deferred))
        fields["turn_stops"] = tuple(state.get("turn_stops", ()))
        fields["score"] = Score(**state["score"]) if state["score"] else None
        for name in ("turn_grades", "turn_scores"):
            scores = state.get(name, {})
            fields[name] = {int(turn): Score(**score) for turn, score in scores.items()}
        return cls(**fields)


_ARRAYS_BY_WINDOW = {"old_values": np.float32, "token_rewards": np.float32, "left_out": np.int32}
_BY_WINDOW = (*_ARRAYS_BY_WINDOW, "reference_kl")
