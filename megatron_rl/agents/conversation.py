"""The rows of one episode: which row a request continues, and with which tokens (see ``Conversation``)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from megatron_rl.agents.chat import ChatAnswer, ChatRequest
from megatron_rl.agents.chat_template import ChatTemplate


class Fork(StrEnum):
    """The reason why a request is a new row."""

    NONE = ""
    """No fork: the first row, or a row goes on."""
    NEW_HISTORY = "new_history"
    PARALLEL = "parallel"
    RESAMPLED = "resampled"
    OMITTED_ANSWER = "omitted_answer"
    EDITED_HISTORY = "edited_history"
    CHANGED_TOOLS = "changed_tools"
    DROPPED_THOUGHTS = "dropped_thoughts"
    TEMPLATE = "template"


@dataclass(frozen=True)
class Place:
    """The row that a request belongs to, and the tokens before its answer."""

    row: int
    """Number of the row; the next free number for a new row."""
    token_ids: tuple[int, ...]
    """The tail to append to an existing row, or the whole prompt of a new row."""
    is_new: bool
    parent: int = -1
    """Row whose prefix the new row shares; -1 without one."""
    fork: Fork = Fork.NONE


class Conversation:
    """The rows of one episode. Not safe for threads."""

    def __init__(self, template: ChatTemplate, thoughts: str = "keep") -> None:
        self.forks: Counter[str] = Counter()
        raise NotImplementedError

    def place(self, request: ChatRequest) -> Place:
        """The row of a request. The row then waits for ``record`` or ``withdraw``. Raises BadRequest if the template refuses."""
        raise NotImplementedError

    def record(self, place: Place, request: ChatRequest, sampled_ids: Sequence[int], answer: ChatAnswer) -> None:
        """The tokens sampled on the place's row (with the stop token), and the answer read from them."""
        raise NotImplementedError

    def withdraw(self, place: Place) -> None:
        """Take back a place before anything was sampled and before its tokens joined the row."""
        raise NotImplementedError

    def num_tokens(self, row: int) -> int:
        """Recorded tokens of a row."""
        raise NotImplementedError
