"""Episodes behind the endpoint: they join the requests of a program to the rows that windows grow.

A row alternates: a request of the program, whose tokens join the row (``Episode.next_message``), and a turn of the policy, which
answers the request. The program waits for the policy (``OpenRequest.answer``); a window waits for the program no longer than
its environment may take. Both sides run on one event loop.

Invariants: a row has at most one open request. A request that continues no row, or a row with an open request, gets a row of
its own (``Branch``). A request that is sent again is answered once. A turn whose client left for good ends with its tokens so far,
and a row that ends with such a turn has no score. The end of an episode ends all its rows and requests.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.agents.chat import BadRequest, ChatAnswer, ChatRequest
from megatron_rl.agents.conversation import Conversation, Place
from megatron_rl.data.trajectory import Score
from megatron_rl.environments.base import Branch, Ended, Message, TurnView

ReadTurn = Callable[[TurnView, ChatRequest, str, int], Awaitable[ChatAnswer]]
"""(turn, request, id of the answer, number of tokens before the turn) -> the answer."""
_NUM_REMEMBERED = 32
"""Requests per episode that a client may send again."""
_THREAD_CHARACTERS = 1 << 16
"""Length from which a request is rendered in a thread: the event loop of the run's servers waits for no long history."""


@dataclass(frozen=True)
class EpisodeLimits:
    max_prompt_tokens: int
    max_response_tokens: int
    max_rows: int = 16
    """Histories per episode: one, and one for each fork."""


@dataclass(eq=False)
class OpenRequest:
    """A request of the program, until its answer is delivered."""

    digest: bytes
    """Digest of path and body: the same for a request that is sent again."""
    place: Place
    answer: "asyncio.Future[ChatAnswer]"
    """Raises BadRequest if no answer comes."""
    request: ChatRequest | None
    """The request; None once it is answered."""
    num_clients: int = 0
    """Connections that wait for the answer: 0 if the client has left, 2 if it has come back before its first one broke."""
    delivered: bool = False
    given_up: bool = False
    """True if the client left, and its turn was ended."""

    @property
    def is_lost(self) -> bool:
        return self.given_up and not self.delivered

    @property
    def message(self) -> Message:
        """The request's tokens and the limits of its answer."""
        limits = (self.request.max_tokens, self.request.stops) if self.request else (0, ())
        return Message(token_ids=self.place.token_ids, max_turn_tokens=limits[0], stop_strings=limits[1])


@dataclass(eq=False)
class Row:
    """One history of an episode, which a trajectory of the run holds."""

    max_tokens: int
    """Largest number of tokens, the first request's included."""
    num_turns: int = 0
    """Turns that were delivered to the program."""
    open: OpenRequest | None = None
    last: OpenRequest | None = None
    """The newest request, open or answered."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Episode:
    """One run of a program: its conversation, rows and open requests."""

    def __init__(
        self,
        name: str,
        conversation: Conversation,
        limits: EpisodeLimits,
        read_turn: ReadTurn,
        branches: "asyncio.Queue[Branch]",
        unwanted: set[str],
    ) -> None:
        """``branches`` and ``unwanted``: those of the environment, for its windows."""
        self.name = name
        self.conversation = conversation
        self.ended: Ended | None = None
        self.num_requests = 0
        self.num_calls = 0
        """Tool calls in the answers."""
        self.num_joined = 0
        """Requests that were sent again and got the answer of the first."""
        self.chains: dict[str, list[dict[str, Any]]] = {}
        """Histories with their last answer, by the id of that answer (``previous_response_id``)."""
        self._limits = limits
        self._read_turn = read_turn
        self._branches = branches
        self._unwanted = unwanted
        self._rows: dict[int, Row] = {}
        self._bound: dict[str, Row] = {}
        self._unbound: list[tuple[Branch, Row]] = []
        self._recent: deque[OpenRequest] = deque(maxlen=_NUM_REMEMBERED)
        self._lock = asyncio.Lock()
        self._answer_numbers = itertools.count()
        self._num_open = 0
        self._open_since_s = 0.0
        self._policy_s = 0.0
        self._first = self._bound[name] = Row(limits.max_prompt_tokens + limits.max_response_tokens)

    @property
    def policy_s(self) -> float:
        """Seconds in which the program waited for an answer."""
        return self._policy_s + (self._now_s() - self._open_since_s if self._num_open else 0.0)

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def num_lost(self) -> int:
        """Rows whose last answer was cut because its client had left."""
        return sum(row.last is not None and row.last.is_lost for row in self._rows.values())

    # ------------------------------------------------------------------------------------------------- the program's side

    async def ask(self, request: ChatRequest, digest: bytes, num_retries: int | None = None, *, num_characters: int = 0) -> OpenRequest:
        """Open a request, or find the one that it repeats. ``num_retries``: as the client counts; None: it does not say.

        Raises BadRequest if the episode has ended, or if the request leaves no room for an answer.
        """
        async with self._lock:
            self._check_open()
            if (known := self._repeated(digest, num_retries)) is not None:
                self.num_joined += 1
                self._want(known)
                return known
            if num_characters > _THREAD_CHARACTERS:
                place = await asyncio.to_thread(self.conversation.place, request)
                if self.ended is not None:  # meanwhile
                    self.conversation.withdraw(place)
                    self._check_open()
            else:
                place = self.conversation.place(request)
            opened = OpenRequest(digest, place, asyncio.get_running_loop().create_future(), request)
            row = self._row_of(opened)
            opened.answer.add_done_callback(self._count_answered)
            self._count_opened()
            self._recent.append(opened)
            row.open = row.last = opened
            row.changed.set()
            return opened

    def give_up(self, opened: OpenRequest) -> None:
        """Let a window end the turn of a request whose client left and did not come back."""
        if opened.num_clients or opened.answer.done():
            return
        self._bind_opened_rows()
        opened.given_up = True
        self._unwanted.update(name for name, row in self._bound.items() if row.open is opened)

    def _want(self, opened: OpenRequest) -> None:
        """Take back ``give_up`` if no window has acted on it."""
        opened.given_up = opened.given_up and opened.answer.done()
        self._unwanted.difference_update(name for name, row in self._bound.items() if row.last is opened)

    def _repeated(self, digest: bytes, num_retries: int | None) -> OpenRequest | None:
        """The open or answered request that this one repeats.

        Clients that count say so. Another client's request is a repetition only if nobody waits for the first any more and its
        answer was not delivered; else it asks for a second sample.
        """
        same = [one for one in self._recent if one.digest == digest and not (one.answer.done() and one.answer.exception())]
        lost = [one for one in same if not one.delivered]
        if num_retries is None:
            lost = [one for one in lost if not one.num_clients]
            return lost[-1] if lost else None
        return (lost or same)[-1] if num_retries and same else None

    def _row_of(self, opened: OpenRequest) -> Row:
        """The row of a request; another row than the first is requested from the windows. Raises BadRequest if there is no room."""
        place = opened.place
        limits, num_tokens = self._limits, self._num_tokens(place)
        row = self._rows.get(place.row) or (Row(self._first.max_tokens) if self._rows else self._first)
        is_new = place.row not in self._rows
        if is_new and len(self._rows) >= limits.max_rows:
            raise self._withdrawn(
                place,
                f"this episode has {len(self._rows)} histories, which is its limit (max_rows), and this request continues none of "
                f"them ({place.fork}); send the conversation as it was answered",
            )
        if is_new and not self._rows:
            if num_tokens > limits.max_prompt_tokens:
                raise self._withdrawn(place, _too_long(num_tokens, limits.max_prompt_tokens, "batch.max_prompt_tokens"))
            row.max_tokens = num_tokens + limits.max_response_tokens
        if num_tokens >= row.max_tokens:
            raise self._withdrawn(place, _too_long(num_tokens, row.max_tokens, "batch.max_response_tokens after the first request"))
        self._rows[place.row] = row
        if row is not self._first and is_new:
            branch = Branch(self.name, opened.message, asyncio.get_running_loop().create_future())
            self._unbound.append((branch, row))
            self._branches.put_nowait(branch)
        return row

    def _withdrawn(self, place: Place, message: str) -> BadRequest:
        self.conversation.withdraw(place)
        return BadRequest(message)

    def _num_tokens(self, place: Place) -> int:
        """Number of tokens before the answer."""
        return len(place.token_ids) + (0 if place.is_new else self.conversation.num_tokens(place.row))

    # ------------------------------------------------------------------------------------------------- the windows' side

    def row(self, name: str) -> Row | None:
        """The row that a trajectory of this name grows."""
        self._bind_opened_rows()
        return self._bound.get(name)

    def _bind_opened_rows(self) -> None:
        for branch, row in self._unbound:
            if branch.opened.done() and not branch.opened.cancelled():
                self._bound[branch.opened.result()] = row
        self._unbound = [one for one in self._unbound if not one[0].opened.done()]

    async def next_message(self, row: Row, turns: Sequence[TurnView]) -> Message | Ended:
        """Answer the row's open request with the last turn, and wait for the next one, or for the end of the episode."""
        if len(turns) > row.num_turns:
            await self._deliver(row, turns)
        while self.ended is None:
            if row.open is not None:
                return row.open.message
            row.changed.clear()
            await row.changed.wait()
        if row.last is not None and row.last.is_lost:
            return Ended(Score(None, error=f"a client of {self.name} left before its last answer was complete"))
        return self.ended

    async def _deliver(self, row: Row, turns: Sequence[TurnView]) -> None:
        opened = row.open
        row.num_turns = len(turns)
        self._unwanted.difference_update(name for name, bound in self._bound.items() if bound is row)
        if opened is None or opened.request is None:
            return  # refused or ended while the turn was sampled
        answer_id = f"{self.name}-{next(self._answer_numbers)}"
        answer = await self._read_turn(turns[-1], opened.request, answer_id, self._num_tokens(opened.place))
        async with self._lock:  # a thread may be placing a long request
            self.conversation.record(opened.place, turns[-1].token_ids, answer)
        self.num_calls += len(answer.calls)
        row.open = opened.request = None
        if not opened.answer.done():
            opened.answer.set_result(answer)

    def close_row(self, row: Row) -> None:
        """A row ended without a reply of its environment: its budget is used up."""
        if row.open is not None:
            self._refuse(row, BadRequest(_too_long(self._num_tokens(row.open.place), row.max_tokens, "the budget of this history")))
        row.max_tokens = 0

    def end(self, ended: Ended) -> None:
        """End all rows with this score, and refuse all open requests."""
        if self.ended is None:
            self.ended = ended
            for branch, _ in self._unbound:
                branch.opened.cancel()  # no window needs to start it any more
            for row in (self._first, *self._rows.values()):
                self._refuse(row, BadRequest(f"episode {self.name} has ended", status=410))
                row.changed.set()
            self._unwanted.difference_update(self._bound)

    def _refuse(self, row: Row, error: BadRequest) -> None:
        opened, row.open = row.open, None
        if opened is not None:
            opened.request = None
            if not opened.answer.done():
                opened.answer.set_exception(error)
                opened.answer.exception()  # seen here, because its client may have left

    def _check_open(self) -> None:
        if self.ended is not None:
            raise BadRequest(f"episode {self.name} has ended; a request needs the key of an episode that runs", status=410)

    # ------------------------------------------------------------------------------------------------------------- clock

    def _count_opened(self) -> None:
        self.num_requests += 1
        if not self._num_open:
            self._open_since_s = self._now_s()
        self._num_open += 1

    def _count_answered(self, _answer: "asyncio.Future[ChatAnswer]") -> None:
        self._num_open -= 1
        if not self._num_open:
            self._policy_s += self._now_s() - self._open_since_s

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


def _too_long(num_tokens: int, limit: int, key: str) -> str:
    # In these words, which clients read: litellm makes a ContextWindowExceededError of them.
    return f"This model's maximum context length is {limit} tokens ({key}). However, your messages resulted in {num_tokens} tokens."
