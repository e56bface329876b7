"""Plays conversations between a client and a made-up model, and keeps what the model sampled."""

import asyncio
import json
import random
from dataclasses import dataclass, field

from megatron_rl.agents.chat import ChatAnswer, ChatRequest
from megatron_rl.agents.chat_template import ChatTemplate
from megatron_rl.agents.conversation import Conversation, Place
from megatron_rl.agents.endpoint import answer_body, parse_request
from megatron_rl.agents.turn_text import parse_turn
from tests.unit.agents.chat_styles import CONTROL, MARKS, TOOLS, WORDS, Style
from tests.unit.agents.clients import Client, Event

NOISE = frozenset({"thoughts", "json", "space", "recut", "cut"})
"""Thoughts; JSON spelled otherwise; blanks at the ends; tokens that the encoder would not choose; turns cut by length anywhere
("end": cut before the stop token)."""


@dataclass
class Played:
    """A conversation as the training side sees it."""

    style: Style
    client: Client
    noise: frozenset[str]
    random: random.Random
    thoughts: str = "keep"
    events: list[Event] = field(default_factory=list)
    rows: dict[int, list[int]] = field(default_factory=dict)
    spans: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """Row, start and sampled tokens of every answer."""
    places: list[Place] = field(default_factory=list)
    requests: list[ChatRequest] = field(default_factory=list)
    answers: list[ChatAnswer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.template = ChatTemplate(self.style.tokenizer)
        self.conversation = Conversation(self.template, self.thoughts)
        self.events += [("system", "Be good."), ("user", self.words(9))]

    def words(self, most: int) -> str:
        return "w" + " ".join(self.random.choices(WORDS, k=self.random.randint(1, most))) + "."

    def request(self) -> ChatRequest:
        return parse_request(self.client.path, json.loads(json.dumps(self.client.body(self.events))))

    def ask(self, *, with_calls: bool) -> dict:
        """One request and its answer; the program's reaction is not added."""
        request = self.request()
        place = self.conversation.place(request)
        return self.answer(place, request, with_calls=with_calls)

    def answer(self, place: Place, request: ChatRequest, *, with_calls: bool) -> dict:
        if place.is_new:
            assert place.row not in self.rows
            self.rows[place.row] = []
        row = self.rows[place.row]
        row += place.token_ids
        ids, stopped = self.sampled(with_calls)
        self.places.append(place)
        self.requests.append(request)
        self.spans.append((place.row, len(row), ids))
        number = len(self.spans)
        reading = parse_turn(
            self.template, request, ids, self.style.parsers, answer_id=f"a{number}", stopped=stopped, num_prompt_tokens=len(row)
        )
        answer = asyncio.run(reading)
        row += ids
        self.answers.append(answer)
        self.conversation.record(place, ids, answer)
        body = json.loads(json.dumps(answer_body(request, answer)))
        self.events.append(("answer", body))
        return body

    def react(self, body: dict) -> None:
        """The program's next message: tool results, or a user's message."""
        calls = self.client.calls(body)
        self.events.append(("results", [(id, self.words(6)) for id in calls]) if calls else ("user", self.words(9)))

    def sampled(self, with_calls: bool) -> tuple[list[int], bool]:
        """Tokens of a turn as a model would sample them, and if it stopped by itself."""
        chance, style = self.random, self.style
        thoughts = self.words(9) if style.read_thoughts and "thoughts" in self.noise else ""
        pad = chance.choice(["", " ", "\n"]) if "space" in self.noise else ""
        body = "" if with_calls and (style.max_calls == 1 or chance.random() < 0.5) else self.words(8) + pad
        calls = [self.call() for _ in range(chance.randint(1, style.max_calls))] if with_calls else []
        stop = style.tokenizer.encode(style.stops[bool(calls)])
        ids = self.recut(style.tokenizer.encode(style.write(thoughts, body, calls)))
        if "cut" in self.noise and chance.random() < 0.2 and len(ids) > 2:
            return ids[: chance.randint(1, len(ids))], False
        if "end" in self.noise and not calls and chance.random() < 0.5:
            return ids, False
        return ids + stop, True

    def call(self) -> tuple[str, str]:
        number = self.random.choice([1, 2.0 if "json" in self.noise else 2, True])
        value = {"path": self.words(3), "n": number, "deep": {"b": [1, "é"], "a": None}}
        odd = {"separators": self.random.choice([(",", ":"), (" , ", ": ")])} if "json" in self.noise else {}
        as_ascii = "json" in self.noise and self.random.random() < 0.5
        return self.random.choice(TOOLS)["function"]["name"], json.dumps(value, ensure_ascii=as_ascii, **odd)

    def recut(self, ids: list[int]) -> list[int]:
        """The same text in other tokens, which the encoder would not choose."""
        tokenizer, pieces = self.style.tokenizer, list[int]()
        marks = {tokenizer.encode(text)[0] for text in (*CONTROL, *MARKS)}
        for id in ids:
            shown = tokenizer.raw_text([id])
            can_split = id not in marks and len(shown) > 1 and "\ufffd" not in shown
            splits = "recut" in self.noise and can_split and self.random.random() < 0.05
            pieces += tokenizer.encode(shown[:1]) + tokenizer.encode(shown[1:]) if splits else [id]
        return pieces

    def turns(self, pattern: str) -> "Played":
        """Plays a turn per letter: "c" with calls, "t" without."""
        for letter in pattern:
            self.react(self.ask(with_calls=letter == "c"))
        return self

    def lost(self) -> int:
        """Number of answers whose tokens are not in their row."""
        return sum(self.rows[row][start : start + len(ids)] != ids for row, start, ids in self.spans)

    def whole(self) -> str:
        """The template's own rendering of the next request."""
        request = self.request()
        return self.style.tokenizer.render_chat(request.messages, request.tools, generate=True)

    def row_text(self) -> str:
        """The row that the next request continues, with its tail."""
        place = self.conversation.place(self.request())
        assert not place.is_new, place.fork
        text = self.style.tokenizer.raw_text([*self.rows[place.row], *place.token_ids])
        self.conversation.withdraw(place)
        return text


def played(style: Style, client: Client, noise: frozenset[str], seed: int, **options) -> Played:
    return Played(style, client, noise, random.Random(f"{style.name} {client.name} {seed}"), **options)
