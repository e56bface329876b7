"""The HTTP server that programs use as OpenAI's or Anthropic's: the run's own address, one key per episode.

Routes: /v1/chat/completions, /v1/messages (and /count_tokens), /v1/responses, /v1/models; plain HTTP (TLS is a proxy's).

Invariants: a key opens one episode and shows nothing of another. Every request is answered, or refused with a reason. While a
program waits for the policy, bytes that clients ignore hold its connection (``_KEEP_ALIVE_S``). The status is held back for
``_HOLD_BACK_S``, so that an early error has a status of its own; a later one is written into the body, and the connection is
broken, so that a client that retries gets the status. A client that leaves may send its request again and gets the answer;
after ``_RETURN_S`` its turn ends with the tokens that it has.

The three protocols stand behind one set of functions: a request from a path and a body, an answer as a body or as a stream.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import secrets
from collections.abc import Iterator
from typing import Any

import orjson
from aiohttp import web

from megatron_rl.agents import chat_completions, messages_api, responses_api
from megatron_rl.agents.chat import BadRequest, ChatAnswer, ChatRequest, Protocol
from megatron_rl.agents.chat_template import ChatTemplate
from megatron_rl.agents.episodes import Episode, OpenRequest
from megatron_rl.agents.request_fields import checked, cleaned
from megatron_rl.agents.responses_api import chain, with_previous

PATHS = {
    "/v1/chat/completions": Protocol.CHAT,
    "/v1/messages": Protocol.MESSAGES,
    "/v1/messages/count_tokens": Protocol.MESSAGES,
    "/v1/responses": Protocol.RESPONSES,
}
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
_APIS = {Protocol.CHAT: chat_completions, Protocol.MESSAGES: messages_api, Protocol.RESPONSES: responses_api}
"""The modules of the protocols; each has parse, body, events and error_events."""
MAX_BODY_BYTES = 8 << 20
_HOLD_BACK_S = 3.0
_KEEP_ALIVE_S = 10.0
_RETURN_S = 10.0
"""Seconds in which a client that left may come back; the official clients retry after at most 8."""
_READ_S = 60.0
"""Seconds in which a client must have sent its body."""
_MODEL = "policy"
_FILLERS = {False: b" ", True: b": wait\n\n"}
"""Bytes that clients ignore, by stream: spaces before JSON, comments between events."""


def parse_request(path: str, body: Any) -> ChatRequest:
    """The request in a parsed JSON body. Raises BadRequest for everything that cannot be answered."""
    if path not in PATHS:
        raise BadRequest(f"{path}: no such path; use one of {', '.join(PATHS)}", status=404)
    fields = cleaned(checked(body, dict, "body"))
    options = {"counts_only": True} if path.endswith("count_tokens") else {}
    request: ChatRequest = _APIS[PATHS[path]].parse(fields, **options)
    if not request.messages:
        field = "input" if request.protocol is Protocol.RESPONSES else "messages"
        raise BadRequest(f"{field}: expected at least one message, got none")
    if request.messages[-1]["role"] == "assistant":
        raise BadRequest("the last message is the assistant's, and answers are not continued; end with a message of the user or of a tool")
    return request


def answer_body(request: ChatRequest, answer: ChatAnswer) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    body: dict[str, Any] = _APIS[request.protocol].body(request, answer)
    return body


def answer_events(request: ChatRequest, answer: ChatAnswer) -> Iterator[bytes]:
    """Server-sent events of a whole answer, made once it is complete."""
    events: Iterator[bytes] = _APIS[request.protocol].events(request, answer)
    return events


def error_body(protocol: Protocol, status: int, message: str) -> dict[str, Any]:
    """The body of an error; clients raise their own error from it."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if protocol is Protocol.MESSAGES:
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def error_events(protocol: Protocol, status: int, message: str) -> Iterator[bytes]:
    """Server-sent events of an error after a stream has begun."""
    events: Iterator[bytes] = _APIS[protocol].error_events(error_body(protocol, status, message))
    return events


class Endpoint:
    """Serves episodes on one event loop, from ``start`` to ``close``."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, template: ChatTemplate, shared_key: str = "") -> None:
        """``template`` counts tokens. ``shared_key``: a key for all episodes, whose requests name theirs in the header X-Session-ID;
        empty: there is none."""
        self._template = template
        self._host = host
        self._port = port
        self._shared_key = shared_key
        self._secret = secrets.token_bytes(32)
        self._episodes: dict[str, Episode] = {}
        self._runner: web.AppRunner | None = None
        self.keep_alive_s = _KEEP_ALIVE_S
        self.hold_back_s = _HOLD_BACK_S
        self.return_s = _RETURN_S
        self.read_s = _READ_S

    async def start(self) -> None:
        """Listen. Raises OSError if the port is taken."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes([web.get("/v1/models", self._models), web.route("*", "/{path:.*}", self._handle)])
        # A client that leaves cancels its handler at once.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port, backlog=4096).start()
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        """Base URL for Anthropic's clients; OpenAI's append /v1."""
        host = "127.0.0.1" if self._host in ("", "0.0.0.0", "::") else self._host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    def add(self, episode: Episode) -> str:
        """Serve an episode; return its key."""
        self._episodes[episode.name] = episode
        return self._key(episode.name)

    def remove(self, name: str) -> None:
        """Stop serving an episode; requests with its key are refused with 410."""
        self._episodes.pop(name, None)

    def _key(self, name: str) -> str:
        # Derived, so that the key of an ended episode is known as one without a list of them.
        return f"{name}.{hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()}"

    def _episode(self, http: web.Request) -> Episode:
        words = http.headers.get("Authorization", "").split()
        key = words[1:] if words and words[0].lower() == "bearer" else words
        given = " ".join(key) or http.headers.get("x-api-key", "").strip()
        name = given.rpartition(".")[0]
        if self._shared_key and hmac.compare_digest(given.encode(), self._shared_key.encode()):
            name = http.headers.get("X-Session-ID", "")
            if name not in self._episodes:
                raise BadRequest("the header X-Session-ID must name an episode that runs, for this key is that of all episodes", 401)
        elif not name or not hmac.compare_digest(given.encode(), self._key(name).encode()):
            raise BadRequest("expected the key of an episode, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'", 401)
        if name not in self._episodes:
            raise BadRequest(f"episode {name} has ended; a request needs the key of an episode that runs", 410)
        return self._episodes[name]

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        protocol = PATHS.get(http.path, Protocol.CHAT)
        try:
            if http.path in PATHS and http.method != "POST":
                raise BadRequest(f"{http.method} {http.path}: expected POST", 405)
            episode = self._episode(http)
            raw = await self._read_body(http)
            body = _parsed(raw)
            body = with_previous(body, episode.chains) if protocol is Protocol.RESPONSES else body
            request = parse_request(http.path, body)
            if http.path.endswith("/count_tokens"):
                return web.json_response({"input_tokens": len(self._template.prompt_ids(request))})
            digest = hashlib.blake2b(http.path.encode() + raw, digest_size=16).digest()
            opened = await episode.ask(request, digest, _num_retries(http), num_characters=len(raw))
        except BadRequest as error:
            return _refusal(protocol, error)
        opened.num_clients += 1
        try:
            return await self._answer(http, request, opened, episode.chains)
        finally:
            opened.num_clients -= 1
            if not opened.answer.done():
                asyncio.get_running_loop().call_later(self.return_s, episode.give_up, opened)

    async def _read_body(self, http: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self.read_s):
                return await http.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise BadRequest(f"the body is longer than {MAX_BODY_BYTES} bytes; send a shorter history", 413) from error
        except TimeoutError as error:
            raise BadRequest(f"the body did not arrive within {self.read_s:.0f} s", 408) from error

    async def _answer(
        self, http: web.Request, request: ChatRequest, opened: OpenRequest, chains: dict[str, list[Any]]
    ) -> web.StreamResponse:
        await asyncio.wait([opened.answer], timeout=self.hold_back_s)
        if opened.answer.done() and isinstance(error := opened.answer.exception(), BadRequest):
            return _refusal(request.protocol, error)
        response = web.StreamResponse(headers=_headers(request))
        with contextlib.suppress(ConnectionResetError):  # the client has left
            await response.prepare(http)
            while not opened.answer.done():
                await response.write(_FILLERS[request.stream])
                await asyncio.wait([opened.answer], timeout=self.keep_alive_s)
            error = opened.answer.exception()
            if error is None and request.protocol is Protocol.RESPONSES:
                chains.update([chain(request, opened.answer.result())])
            for part in _parts(request, error or opened.answer.result()):
                await response.write(part)
            if error is not None and http.transport is not None:
                http.transport.close()
                return response
            await response.write_eof()
            opened.delivered = True
        return response

    async def _models(self, http: web.Request) -> web.StreamResponse:
        """One model, with the fields of both protocols."""
        try:
            self._episode(http)
        except BadRequest as error:
            return _refusal(Protocol.CHAT, error)
        model = {"id": _MODEL, "object": "model", "created": 0, "owned_by": "megatron_rl"}
        model |= {"type": "model", "display_name": _MODEL, "created_at": "1970-01-01T00:00:00Z"}
        return web.json_response({"object": "list", "data": [model], "has_more": False, "first_id": _MODEL, "last_id": _MODEL})


def _parts(request: ChatRequest, outcome: ChatAnswer | BaseException) -> Iterator[bytes]:
    if isinstance(outcome, BaseException):
        status, text = (outcome.status, str(outcome)) if isinstance(outcome, BadRequest) else (500, "the run has stopped")
        if request.stream:
            yield from error_events(request.protocol, status, text)
        else:
            yield orjson.dumps(error_body(request.protocol, status, text))
    elif request.stream:
        yield from answer_events(request, outcome)
    else:
        yield orjson.dumps(answer_body(request, outcome))


def _headers(request: ChatRequest) -> dict[str, str]:
    if request.stream:
        return {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    return {"Content-Type": "application/json"}


def _refusal(protocol: Protocol, error: BadRequest) -> web.Response:
    # A retry would be refused too; the official clients read this header.
    headers = {"x-should-retry": "false"}
    return web.json_response(error_body(protocol, error.status, str(error)), status=error.status, headers=headers)


def _parsed(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except ValueError:
        pass
    try:
        return json.loads(raw)  # which reads lone surrogates, as Python's clients write them
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {str(error)[:100]}") from error


def _num_retries(http: web.Request) -> int | None:
    """Number of retries that the client counts; None: it does not count."""
    text = http.headers.get("x-stainless-retry-count", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 4 else None
