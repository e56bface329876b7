"""The chat template of a model: whole prompts, and the tail that follows an answer.

A history is never encoded again. The next request of a conversation is rendered twice, with a sentinel instead of the
last answer: with the messages after the answer, and without. What follows the sentinel is encoded, cut after the stop token
that was sampled, and appended to the row. The sampled tokens stay whatever the template, the client or the encoder would
make of their text.

Contents that come from outside make no control tokens: a control token's text in a message, a tool or an argument is
replaced by a placeholder before the template runs, and encoded as ordinary letters.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.agents.chat import BadRequest, ChatRequest
from megatron_rl.data.tokenizer import Message, Tokenizer
from megatron_rl.errors import DataError

_THOUGHT_MARKS = ("<think>", "</think>")
"""Marks that templates read in the text of an answer."""


@dataclass(frozen=True)
class Sampled:
    """An answer as tokens."""

    message: Message
    token_ids: Sequence[int]
    stopped: bool
    """True if the last token is the stop token."""


class ChatTemplate:
    """The template and the encoder of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        special = set(tokenizer.special_texts)
        marks = {text for text in tokenizer.added_texts if text in special or (text.strip() and text in tokenizer.template_text)}
        # Longest first: a mark may begin with another.
        self._marks = sorted(marks, key=lambda text: (-len(text), text))
        self._all_marks = _pattern(self._marks)
        self._marks_of_answers = _pattern([text for text in self._marks if text in special and text not in _THOUGHT_MARKS])
        self._mark_ids = {tokenizer.encode(text)[0] for text in self._marks}

    def prompt_ids(self, request: ChatRequest) -> list[int]:
        """The whole request as tokens, up to the start of the answer. Raises BadRequest if the template rejects it."""
        page = _Page(self, request)
        return page.encode(page.render(request.messages))

    def shown_thoughts(self, request: ChatRequest, places: set[int]) -> set[int]:
        """Places among ``places`` (of answers in the request's messages) where the template would show thoughts."""
        page = _Page(self, request)
        marked = list(request.messages)
        for i in places:
            marked[i] = {**marked[i], "reasoning_content": f"{page.sentinel}T{i}E"}
        text = page.render(marked)
        return {i for i in places if f"{page.sentinel}T{i}E" in text}

    def tail_ids(self, request: ChatRequest, place: int, sampled: Sampled) -> list[int] | None:
        """Tokens to append to the row that ends with the answer at ``place`` of the request's messages.

        None if the template does not show an answer's text, so that no tail can be found. Raises BadRequest if the template
        rejects the messages.
        """
        page = _Page(self, request)
        tails = self._tails(page, request.messages, place, sampled.message)
        if tails is None:
            return None
        tail, alone = tails
        num_shared = next((i for i, (a, b) in enumerate(zip(alone, tail, strict=False)) if a != b), min(len(alone), len(tail)))
        if sampled.stopped:
            return tail[self._end_of_stop(alone, tail, num_shared, sampled.token_ids[-1]) :]
        if sampled.message.get("tool_calls"):
            return tail[self._end_of_call(alone[:num_shared], sampled.token_ids[-1]) :]
        return [*self._close_of_thoughts(page, request.messages[:place], sampled), *tail]

    def stop_id(self, request: ChatRequest, place: int, message: Message) -> int | None:
        """Control token with which the template ends this answer, or begins what follows it; None without one."""
        tails = self._tails(_Page(self, request), request.messages, place, message)
        special = set(self.tokenizer.special_ids)
        found = [[id for id in ids if id in special] for ids in tails or ([], [])]
        return found[1][-1] if found[1] else found[0][0] if found[0] else None

    def _tails(self, page: "_Page", messages: Sequence[Message], place: int, message: Message) -> tuple[list[int], list[int]] | None:
        """Tokens that the template writes after an answer: in these messages, and after an answer that is the last message."""
        before, after = messages[:place], messages[place + 1 :]
        for marked in _marked(message, page.sentinel):
            text = page.render([*before, marked, *after])
            if page.sentinel in text:
                alone = page.render([*before, marked], generate=False)
                return page.encode(text.rpartition(page.sentinel)[2]), page.encode(alone.rpartition(page.sentinel)[2])
        return None

    def _end_of_stop(self, alone: list[int], tail: list[int], num_shared: int, stop_id: int) -> int:
        """Number of the tail's tokens that the sampled stop token stands for."""
        if stop_id in tail[: num_shared + 1]:
            return tail.index(stop_id) + 1
        if alone[num_shared : num_shared + 1] == [stop_id]:
            return num_shared + 1  # at the end of a last answer the template writes another token (harmony)
        # Another stop token than the template's takes its place.
        return max((i + 1 for i in range(num_shared) if alone[i] in self._mark_ids), default=0)

    def _end_of_call(self, close: list[int], last_id: int) -> int:
        """Number of tokens of a call's close that a turn has already, which was cut after a whole call."""
        marks = [i for i, id in enumerate(close) if id in self._mark_ids]
        return next((i + 1 for i in reversed(marks) if close[i] == last_id), marks[-1] if marks else 0)

    def _close_of_thoughts(self, page: "_Page", before: Sequence[Message], sampled: Sampled) -> list[int]:
        """Tokens that close the thoughts of a turn which was cut inside them; empty for other turns."""
        if not sampled.message.get("reasoning_content") or sampled.message["content"]:
            return []
        marked = {"role": "assistant", "reasoning_content": page.sentinel, "content": page.sentinel}
        pieces = page.render([*before, marked], generate=False).split(page.sentinel)
        close = pieces[1] if len(pieces) == 3 else "\n</think>\n\n" if "</think>" in self.tokenizer.added_texts else ""
        if not close.strip() or close.strip() in self.tokenizer.raw_text(sampled.token_ids):
            return []
        return self.tokenizer.encode(close)


class _Page:
    """A request with placeholders for the control tokens' texts in its contents."""

    def __init__(self, template: ChatTemplate, request: ChatRequest) -> None:
        self._template, self._request = template, request
        texts = repr((request.messages, request.tools))
        # ASCII letters and digits, which no template escapes, strips or changes; in no text of the request.
        number = next(n for n in range(len(texts) + 1) if f"KEPT{n}Q" not in texts and f"MARK{n}Q" not in texts)
        self.sentinel, self._placeholder = f"KEPT{number}Q", f"MARK{number}Q"
        self._numbers = {text: i for i, text in enumerate(template._marks)}
        self._tools = [self._guarded(tool, template._all_marks) for tool in request.tools]

    def render(self, messages: Sequence[Message], *, generate: bool = True) -> str:
        template, guarded = self._template, []
        for message in messages:
            marks = template._marks_of_answers if message["role"] == "assistant" else template._all_marks
            guarded.append({name: value if name == "role" else self._guarded(value, marks) for name, value in message.items()})
        try:
            return template.tokenizer.render_chat(guarded, self._tools, generate=generate, arguments=self._request.template_arguments)
        except DataError as error:
            raise BadRequest(" ".join(str(error).partition(": ")[2].split())) from error

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text; a placeholder becomes the ordinary letters of its control token."""
        encode, ids = self._template.tokenizer.encode, list[int]()
        for i, piece in enumerate(re.split(rf"{self._placeholder}(\d+)E", text)):
            ids += self._template.tokenizer.encode_plain(self._template._marks[int(piece)]) if i % 2 else encode(piece) if piece else []
        return ids

    def _guarded(self, value: Any, marks: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return marks.sub(lambda found: f"{self._placeholder}{self._numbers[found[0]]}E", value)
        if isinstance(value, dict):
            return {self._guarded(name, marks): self._guarded(item, marks) for name, item in value.items()}
        if isinstance(value, list):
            return [self._guarded(item, marks) for item in value]
        return value


def _pattern(texts: Sequence[str]) -> re.Pattern[str]:
    """Pattern of any of these texts; without texts it matches nothing."""
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _marked(message: Message, sentinel: str) -> list[Message]:
    """The answer with the sentinel at its end, in the forms to try: some templates show the first of several calls only."""
    calls = message.get("tool_calls")
    if not calls:
        return [{**message, "content": sentinel}]
    found = []
    for i in dict.fromkeys((len(calls) - 1, 0)):
        function = {**calls[i]["function"], "arguments": {"x": sentinel}}
        found.append({**message, "tool_calls": [*calls[:i], {**calls[i], "function": function}, *calls[i + 1 :]]})
    return found
