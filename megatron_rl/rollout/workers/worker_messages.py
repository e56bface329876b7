"""The messages between a rollout worker and its owner, who sends lists of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.data.trajectory import TokenParts


@dataclass(frozen=True)
class CallRequest:
    number: int
    question: Any


@dataclass(frozen=True)
class CallReply:
    """The answer to the ``Ask`` with this number, or the error that it ended with."""

    number: int
    answer: Any = None
    error: Exception | None = None


@dataclass(frozen=True)
class DetokenizeRequest:
    """A question: what these sequences of tokens say, without special tokens."""

    sequences: Sequence[TokenParts]


@dataclass(frozen=True)
class SetTokenizer:
    """For all ``DetokenizeRequest`` that come later: a tokenizer, as tokenizer.json has it."""

    tokenizer_json: str


@dataclass(frozen=True)
class Cancel:
    """Nobody waits for the reply to this ``Ask`` any more."""

    number: int


@dataclass(frozen=True)
class Free:
    """The owner has dropped ranges of the worker's file."""

    ranges: Sequence[tuple[int, int]]
    """(first byte, bytes) of each."""


@dataclass(frozen=True)
class Ping:
    """A question, and the same back: the worker's event loop turns."""
