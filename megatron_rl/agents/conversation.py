"""The rows of one episode: which row a request continues, and with which tokens.

A history is found again as a chain of digests over (role, stripped text, calls as JSON values), so that ids, nulls, thoughts
and the spelling of JSON, which clients drop or change, do not matter; ids that a client sends back decide between equal
answers. A row goes on from its last answer only. Everything else is a fork, with its reason: a new row, whose prompt is the
other row up to the last answer that both share, and a tail.

Invariant: the tokens of a row are those that were sampled, and between them those of the template (``chat_template.py``).
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from megatron_rl.agents.chat import ChatAnswer, ChatRequest
from megatron_rl.agents.chat_template import ChatTemplate, Sampled
from megatron_rl.agents.request_fields import parsed_arguments
from megatron_rl.data.tokenizer import Message


class Fork(StrEnum):
    """The reason why a request is a new row."""

    NONE = ""
    """No fork: the first row, or a row goes on."""
    NEW_HISTORY = "new_history"
    """No answer of the episode is in the history: a subagent, or a history that the program has summarized."""
    PARALLEL = "parallel"
    """The row that the request would continue waits for another answer."""
    RESAMPLED = "resampled"
    """The same request has been answered."""
    OMITTED_ANSWER = "omitted_answer"
    """The program has left out the row's later answers and goes on from before them."""
    EDITED_HISTORY = "edited_history"
    """The history differs from the row's after an answer that both share."""
    CHANGED_TOOLS = "changed_tools"
    """The history is known with other tools or template arguments, which stand at its beginning."""
    DROPPED_THOUGHTS = "dropped_thoughts"
    """The template drops thoughts that the row has, and ``thoughts: template`` follows it."""
    TEMPLATE = "template"
    """The template does not show the last answer's text, so that nothing can be appended to it."""


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


@dataclass(frozen=True)
class _Answer:
    """An answer in the tree of histories."""

    key: bytes
    """Digest of the history that ends with this answer; no other answer has the same."""
    row: int
    end: int
    """Number of the row's tokens up to the end of the answer."""
    said: ChatAnswer
    sampled: Sampled


@dataclass(frozen=True)
class _History:
    """A request's messages, with the answers found among them."""

    root: bytes
    """Key of the empty history."""
    found: list[tuple[int, _Answer]]
    """Place in the messages and answer, in order."""
    key: bytes
    new: list[bytes]
    """Digests of the messages after the last answer."""

    @property
    def last(self) -> _Answer | None:
        return self.found[-1][1] if self.found else None

    @property
    def from_key(self) -> bytes:
        """Key of the history that the new messages follow."""
        return self.last.key if self.last else self.root


@dataclass
class _Row:
    token_ids: list[int] = field(default_factory=list)
    tip: bytes = b""
    """Key of the last answer."""
    waiting: tuple[Place, _History] | None = None
    """The place that waits for its answer."""
    asked: dict[bytes, list[bytes]] = field(default_factory=dict)
    """Key of a history -> digests of the messages that the row's request had after it."""
    thoughts: set[bytes] = field(default_factory=set)
    """Keys of the answers whose thoughts are in the row."""


class Conversation:
    """The rows of one episode. ``forks`` counts new rows by reason."""

    def __init__(self, template: ChatTemplate, thoughts: str = "keep") -> None:
        """``thoughts``: "keep" leaves sampled thoughts in their row; "template" makes a new row when the template drops some."""
        if thoughts not in ("keep", "template"):
            raise ValueError(f"thoughts must be 'keep' or 'template', got {thoughts!r}")
        self._template, self._follows_template = template, thoughts == "template"
        self._rows: dict[int, _Row] = {}
        self._num_rows = 0
        self._answers: dict[bytes, list[_Answer]] = defaultdict(list)
        """Key of a request's history -> its answers."""
        self._roots: set[bytes] = set()
        self.forks: Counter[Fork] = Counter()

    def place(self, request: ChatRequest) -> Place:
        """The row of a request. The row then waits for ``record`` or ``withdraw``. Raises BadRequest if the template refuses."""
        history = self._history(request, _root(request))
        last, fork, tail = history.last, self._fork(request, history), None
        shown = self._shown_thoughts(request, history) if self._follows_template else set()
        if last:
            kept = self._rows[last.row].thoughts & {answer.key for _, answer in history.found}
            if self._follows_template and not kept <= shown:
                fork = Fork.DROPPED_THOUGHTS
            else:
                tail = self._template.tail_ids(request, history.found[-1][0], last.sampled)
                shown = kept
                fork = Fork.TEMPLATE if tail is None else fork
        is_new = fork is not Fork.NONE or last is None
        if last and tail is not None:
            token_ids = [*self._rows[last.row].token_ids[: last.end], *tail] if is_new else tail
        else:
            token_ids = self._template.prompt_ids(_with_thoughts(request, history) if self._follows_template else request)
        row = self._num_rows if last is None or is_new else last.row
        place = Place(row, tuple(token_ids), is_new, last.row if last and is_new and tail is not None else -1, fork)
        self._num_rows += is_new
        self.forks[fork] += fork is not Fork.NONE
        self._roots.add(history.root)
        self._wait(place, history, shown)
        return place

    def _wait(self, place: Place, history: _History, thoughts: set[bytes]) -> None:
        row = self._rows.setdefault(place.row, _Row(thoughts=thoughts))
        row.waiting = place, history
        row.asked[history.from_key] = history.new

    def record(self, place: Place, sampled_ids: Sequence[int], answer: ChatAnswer) -> None:
        """Add the tokens sampled at a place (with their stop token), and the answer read from them."""
        row = self._rows[place.row]
        if row.waiting is None or row.waiting[0] is not place:
            raise ValueError(f"row {place.row} does not wait for this answer; record each place once")
        key = row.waiting[1].key
        row.token_ids += [*place.token_ids, *sampled_ids]
        siblings = self._answers[key]
        row.tip, row.waiting = _chained(key, f"answer {len(siblings)}"), None
        sampled = Sampled(_message(answer), tuple(sampled_ids), stopped=answer.finish != "length" and not answer.stop_string)
        siblings.append(_Answer(row.tip, place.row, len(row.token_ids), answer, sampled))
        if answer.thoughts:
            row.thoughts.add(row.tip)

    def withdraw(self, place: Place) -> None:
        """Take back a place before anything was sampled and before its tokens joined the row."""
        row = self._rows[place.row]
        row.waiting = None
        row.asked.pop(row.tip, None)
        if place.is_new:
            del self._rows[place.row]
            self.forks[place.fork] -= place.fork is not Fork.NONE

    def num_tokens(self, row: int) -> int:
        """Number of a row's recorded tokens."""
        return len(self._rows[row].token_ids)

    def _history(self, request: ChatRequest, root: bytes) -> _History:
        """The request's messages, matched from the first one on."""
        key, found, new = root, list[tuple[int, _Answer]](), list[bytes]()
        for i, message in enumerate(request.messages):
            echoes = request.echoes[i] if i < len(request.echoes) else ()
            answer = self._answer(key, message, echoes) if message["role"] == "assistant" else None
            if answer:
                key, new = answer.key, []
                found.append((i, answer))
            else:
                new.append(_digest(message))
                key = _chained(key, new[-1].hex())
        return _History(root, found, key, new)

    def _answer(self, key: bytes, message: Message, echoes: Sequence[str]) -> _Answer | None:
        """The answer after this history that the message is a copy of."""
        best, best_rank = None, (False, False, False)
        for answer in self._answers.get(key, ()):
            is_echo = any(answer.said.id in echo or echo in {call.id for call in answer.said.calls} for echo in echoes if echo)
            # Some clients leave out the text next to calls.
            copies = [answer.sampled.message, {**answer.sampled.message, "content": ""}] if is_echo else [answer.sampled.message]
            if _digest(message) in map(_digest, copies):
                rank = is_echo, answer.said.thoughts == message.get("reasoning_content", ""), self._rows[answer.row].tip == answer.key
                if best is None or rank >= best_rank:
                    best, best_rank = answer, rank
        return best

    def _fork(self, request: ChatRequest, history: _History) -> Fork:
        """The reason why a request cannot continue the row of its last answer; NONE if it can, or if it is the first."""
        last = history.last
        rows = [self._rows[last.row]] if last else list(self._rows.values())
        is_tip = last is not None and rows[0].tip == last.key
        if not rows or (is_tip and not rows[0].waiting):
            return Fork.NONE
        if is_tip or any(row.waiting and row.waiting[1].key == history.key for row in rows):
            return Fork.PARALLEL
        if self._answers.get(history.key):
            return Fork.RESAMPLED
        for row in rows:
            asked = row.asked.get(history.from_key, history.new)
            more = len(asked) - len(history.new)
            if more < 0 and history.new[: len(asked)] == asked:
                return Fork.EDITED_HISTORY if request.messages[more]["role"] == "assistant" else Fork.OMITTED_ANSWER
        if last:
            return Fork.EDITED_HISTORY
        is_known = any(self._history(request, root).found for root in self._roots - {history.root})
        return Fork.CHANGED_TOOLS if is_known else Fork.NEW_HISTORY

    def _shown_thoughts(self, request: ChatRequest, history: _History) -> set[bytes]:
        """Keys of the answers whose thoughts the template shows in this request."""
        thoughtful = {i: answer for i, answer in history.found if answer.said.thoughts}
        return {thoughtful[i].key for i in self._template.shown_thoughts(request, set(thoughtful))} if thoughtful else set()


def _with_thoughts(request: ChatRequest, history: _History) -> ChatRequest:
    """The request with the thoughts of its answers, which the client may have dropped."""
    messages = list(request.messages)
    for i, answer in history.found:
        messages[i] = {**messages[i], "reasoning_content": answer.said.thoughts}
    return replace(request, messages=tuple(messages))


def _message(answer: ChatAnswer) -> Message:
    """The answer in the form of a request's messages."""
    functions = [(call.id, {"name": call.name, "arguments": parsed_arguments(call.arguments, "arguments")}) for call in answer.calls]
    calls = {"tool_calls": [{"id": id, "type": "function", "function": function} for id, function in functions]} if functions else {}
    return {"role": "assistant", "content": answer.text, **({"reasoning_content": answer.thoughts} if answer.thoughts else {}), **calls}


def _root(request: ChatRequest) -> bytes:
    """Key of the empty history: tools and template arguments stand before everything else."""
    return _chained(b"", _plain([request.tools, request.template_arguments]))


def _chained(key: bytes, text: str) -> bytes:
    return hashlib.blake2b(key + text.encode(), digest_size=16).digest()


def _digest(message: Message) -> bytes:
    """Digest of what a client keeps of a message."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return _chained(b"", _plain([message["role"], message["content"].strip(), calls]))


def _plain(value: Any) -> str:
    return json.dumps(_numbers(value), sort_keys=True)


def _numbers(value: Any) -> Any:
    """The value with numbers as JavaScript keeps them: 1.0 is 1, and a large integer is a float."""
    if isinstance(value, Mapping):
        return {name: _numbers(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        return value
    number = float(value)
    return int(number) if number.is_integer() else number
