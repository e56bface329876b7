"""The messages between a rollout worker and its owner, who sends lists of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_rl.data.trajectory import TokenParts
from megatron_rl.rollout.requests import BatchCall, WorkerLost
from megatron_rl.system.files.shared_file import NODE


class NodeLost(WorkerLost):
    """The workers of another node cannot be reached any more."""


class RemoteWorkerInfo(NamedTuple):
    """A rollout worker of another node."""

    host: str
    port: int
    secret: str
    """In hexadecimal digits: who connects sends it first."""
    pid: int
    """Who keeps its shared file open; with the node, as in an address."""
    fd: int

    def __str__(self) -> str:
        return f"the rollout worker of node {self.pid // NODE} at {self.host}:{self.port}"


@dataclass(frozen=True)
class RemoteCall:
    """A question: what another node's worker makes of a call, whose routes stay there."""

    worker: RemoteWorkerInfo
    number: int
    """In the places of what stays there: ``number * FILE`` more than in the worker's file."""
    batch: BatchCall
    freed: Sequence[tuple[int, int]]
    """(start, bytes) of extents that nobody refers to any more."""


FILE = 1 << 48


@dataclass(frozen=True)
class Free:
    """As ``Drop``, in the file of a worker of another node."""

    start: int
    num_bytes: int


@dataclass(frozen=True)
class CallRequest:
    number: int
    question: Any


@dataclass(frozen=True)
class CallReply:
    """Of an ``Ask`` with this number: its answer, or the error that it ended with."""

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
class Drop:
    """An extent of the shared file that the owner has nothing of any more."""

    start: int


@dataclass(frozen=True)
class Ping:
    """A question, and the same back: the worker's event loop turns."""
