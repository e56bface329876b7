"""The messages between a rollout worker and its owner, who sends lists of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.data.trajectory import TokenParts


@dataclass(frozen=True)
class Ask:
    number: int
    question: Any


@dataclass(frozen=True)
class Reply:
    """Of an ``Ask`` with this number: its answer, or the error that it ended with."""

    number: int
    answer: Any = None
    error: Exception | None = None


@dataclass(frozen=True)
class Texts:
    """A question: what these sequences of tokens say, without special tokens."""

    sequences: Sequence[TokenParts]


@dataclass(frozen=True)
class Vocabulary:
    """For all ``Texts`` that come later: a tokenizer, as tokenizer.json has it."""

    tokenizer_json: str


@dataclass(frozen=True)
class Cancel:
    """Nobody waits for the reply to this ``Ask`` any more."""

    number: int


@dataclass(frozen=True)
class Drop:
    """An extent of the shared file that the owner has nothing of any more."""

    start: int


@dataclass(frozen=True)
class Alive:
    """A question, and the same back: the worker's event loop turns."""
