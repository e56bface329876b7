"""Stub servers that reply to ``/generate`` like SGLang 0.5.23, with synthetic tokens: real JSON over a real socket, no model.

    python tools/stub_servers.py lengths.npy --servers 4 --prompt-tokens 300 --routes 48x8x128

``lengths.npy``: by trajectory id, how long each response becomes. One line of JSON with the servers' URLs is printed when they
listen; they end with the process that started them. Each server is a process: what it costs is not the client's. It writes
``ANSWERS_AT_ONCE`` answers at a time, piece by piece: with routes one of them has tens of megabytes.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pybase64
from aiohttp import web

VOCAB_SIZE = 151_000
NUM_STORED = 1 << 16
"""Tokens that the answers are made of; another part of them for each response."""
STOP_TOKEN = 2
ANSWERS_AT_ONCE = 8
_PIECE_BYTES = 1 << 18
_OF_RID = re.compile(r"-\d+-(\d+)-\d+")


class Answers:
    """Texts of answers, cut out of prepared ones."""

    def __init__(
        self, lengths: np.ndarray, prompt_tokens: int, routes: tuple[int, int, int] | None, version: str, image_tokens: int = 1
    ) -> None:
        random = np.random.default_rng(1)
        ids = random.integers(1000, VOCAB_SIZE, NUM_STORED).tolist()
        logprobs = (-random.exponential(0.4, NUM_STORED)).astype(np.float32).tolist()
        self._lengths, self._prompt_tokens, self._version = lengths, prompt_tokens, version
        self._more_per_image = image_tokens - 1
        self._ids = _Cut([b"%d" % token for token in ids], b"%d" % STOP_TOKEN)
        pairs = [orjson.dumps([logprob, token, None]) for logprob, token in zip(logprobs, ids, strict=True)]
        self._pairs = _Cut(pairs, orjson.dumps([-0.1, STOP_TOKEN, None]))
        self._routes = None if routes is None else _Repeated(_random_routes(random, *routes))

    def sample(
        self, rid: str, num_given: int, max_new_tokens: int, num_images: int = 0, *, with_routes: bool = True
    ) -> list[bytes | memoryview]:
        """The JSON of one sample that had ``num_given`` tokens, one of them for each image, in pieces."""
        num_given += num_images * self._more_per_image
        found = _OF_RID.search(rid)
        index = int(found[1]) if found else 0
        left = int(self._lengths[index % len(self._lengths)]) - (num_given - self._prompt_tokens)
        num_new = max(1, min(left, max_new_tokens))
        first = index * 7919 % (NUM_STORED // 2)
        ends = num_new >= left
        finish = {"type": "stop", "matched": STOP_TOKEN} if ends else {"type": "length", "length": num_new}
        meta: dict[str, Any] = {
            "id": rid, "finish_reason": finish, "prompt_tokens": num_given, "weight_version": self._version,
            "total_retractions": 0, "completion_tokens": num_new, "cached_tokens": 0, "e2e_latency": 1.0,
            "output_token_logprobs_length": num_new, "input_token_logprobs": [],
        }  # fmt: skip
        head = b'{"text":"","output_ids":[' + self._ids.part(first, num_new, ends) + b'],"meta_info":' + orjson.dumps(meta)[:-1]
        tail = b',"output_token_logprobs":[' + self._pairs.part(first, num_new, ends) + b"]}}"
        if self._routes is None or not with_routes:
            return [head, tail]
        return [head, b',"routed_experts":"', *self._routes.rows(num_given + num_new - 1), b'"', tail]


class _Repeated:
    """Base64 of an array's rows, again and again from its beginning."""

    def __init__(self, array: np.ndarray) -> None:
        self._rows = np.tile(array, (3, 1))  # so many bytes that nothing is left over between two of them
        self._text = memoryview(pybase64.b64encode(self._rows.tobytes()))

    def rows(self, number: int) -> Iterator[bytes | memoryview]:
        whole, rest = divmod(number, len(self._rows))
        for _ in range(whole):
            yield self._text
        yield pybase64.b64encode(self._rows[:rest].tobytes())


class _Cut:
    """Words with commas between them, any run of which is one part of a text."""

    def __init__(self, words: list[bytes], last: bytes) -> None:
        self._last = last
        ends = np.cumsum([len(word) + 1 for word in words])
        self._text, self._starts, self._ends = b",".join(words) + b",", ends - [len(word) + 1 for word in words], ends

    def part(self, first: int, number: int, ends: bool) -> bytes:
        """``number`` words from ``first`` on; if ``ends``, the last one is the stop token's."""
        parts, number = [], number - ends
        while number > 0:
            taken = min(number, len(self._ends) - first)
            parts.append(self._text[self._starts[first] : self._ends[first + taken - 1] - 1])
            first, number = 0, number - taken
        return b",".join([*parts, self._last] if ends else parts)


def _random_routes(random: np.random.Generator, layers: int, top_k: int, experts: int) -> np.ndarray:
    """[256, layers * top_k] int32"""
    choices = np.argsort(random.random((256, layers, experts), dtype=np.float32), -1)[..., :top_k]
    return np.ascontiguousarray(choices.reshape(256, -1).astype(np.int32))


def serve(listener: socket.socket, answers: Answers, parent: int) -> None:
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()

    places = asyncio.Semaphore(ANSWERS_AT_ONCE)

    async def generate(request: web.Request) -> web.StreamResponse:
        with contextlib.suppress(ConnectionError):  # who asked does not wait any more
            async with places:
                return await _written(request, pieces_of(orjson.loads(await request.read())))
        return web.Response()

    def pieces_of(body: dict[str, Any]) -> list[bytes | memoryview]:
        pieces: list[bytes | memoryview] = []
        images = body.get("image_data") or [()] * len(body["rid"])
        for rid, ids, params, own in zip(body["rid"], body["input_ids"], body["sampling_params"], images, strict=True):
            with_routes = body.get("return_routed_experts", False)
            pieces += [b",", *answers.sample(rid, len(ids), params["max_new_tokens"], len(own), with_routes=with_routes)]
        return [b"[", *pieces[1:], b"]"]

    app = web.Application(client_max_size=1 << 32)
    app.router.add_post("/generate", generate)
    web.run_app(app, sock=listener, print=None, handle_signals=False, loop=asyncio.new_event_loop())


async def _written(request: web.Request, pieces: list[bytes | memoryview]) -> web.StreamResponse:
    """No faster than it is read."""
    response = web.StreamResponse()
    response.content_type, response.content_length = "application/json", sum(map(len, pieces))
    await response.prepare(request)
    for piece in pieces:
        for start in range(0, len(piece), _PIECE_BYTES):
            await response.write(memoryview(piece)[start : start + _PIECE_BYTES])
    await response.write_eof()
    return response


def _end_after(parent: int) -> None:
    """A process whose parent has ended, however it did, has another one."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lengths")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=300)
    parser.add_argument("--image-tokens", type=int, default=1, help="tokens per image, also counted in --prompt-tokens")
    parser.add_argument("--routes", default="", help="layers x experts of a token x experts, as 48x8x128")
    parser.add_argument("--version", default="1")
    arguments = parser.parse_args()
    layers, top_k, experts = map(int, (arguments.routes or "0x0x0").split("x"))
    routes = (layers, top_k, experts) if arguments.routes else None
    answers = Answers(np.load(arguments.lengths), arguments.prompt_tokens, routes, arguments.version, arguments.image_tokens)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(arguments.servers)]
    for listener in listeners:
        multiprocessing.get_context("fork").Process(target=serve, args=(listener, answers, os.getpid()), daemon=True).start()
    print(json.dumps([f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]), flush=True)
    sys.stdin.buffer.read()  # ends when the process that holds its other end does


if __name__ == "__main__":
    main()
