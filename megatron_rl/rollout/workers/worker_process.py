"""A rollout worker: ``python -m megatron_rl.rollout.workers.worker_process PARENT serve SOCKET FILE`` (a pid and two fds).

The worker makes its owner's calls (``worker_pool.py``) concurrently, or forwards them to a worker on another node,
and sends each reply back; it also decodes tokens. It exits when its owner closes the connection or exits, and
handles no signal itself.

A remote worker (``listen`` instead of ``serve``; the secret comes on stdin) does the same for every process that
connects and sends the secret, but the routes, which are large, stay in its own file. It exits with the process that
started it.
"""

import asyncio
import contextlib
import gc
import os
import socket
import sys
from collections.abc import Awaitable, Sequence
from typing import Any

import numpy as np
import tokenizers

from megatron_rl.data.trajectory import TokenParts
from megatron_rl.rollout.requests import BatchCall, BatchReply, Generation
from megatron_rl.rollout.sglang.wire.batch_call import exchange
from megatron_rl.rollout.workers.remote_calls import Relay, RemoteCall, RemoteWorkerInfo
from megatron_rl.rollout.workers.worker_connection import (
    MESSAGES_PER_TURN,
    PING,
    STREAM_BYTES,
    CallReply,
    CallRequest,
    Free,
    RangeOf,
    SetTokenizer,
    frame,
    read_frame,
)
from megatron_rl.system.files.shared_file import ArrayRange, SharedFile
from megatron_rl.system.http.json_http import HttpSession
from megatron_rl.system.processes import process_probe
from megatron_rl.system.processes.child_process import SECRET_BYTES, begin_child, is_secret, read_secret

_WAIT_SHARE = 0.01
"""Fraction of a call's time that its reply may wait to be sent with others: waking the owner costs more than reading a reply."""
_MAX_WAIT_S = 0.25
_SECRET_TIMEOUT_S = 30.0


class _CallHandler:
    """Handles the calls of one owner."""

    def __init__(self, http: HttpSession, file: SharedFile, writer: asyncio.StreamWriter, *, is_remote: bool = False) -> None:
        self._is_remote = is_remote
        self._relays: dict[RemoteWorkerInfo, Relay] = {}
        self._http = http
        self._file = file
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ready: list[Any] = []
        """Messages that wait to be sent together."""
        self._writes: asyncio.TimerHandle | None = None
        self._tokenizer: tokenizers.Tokenizer | None = None

    def handle(self, message: Any) -> None:
        match message:
            case CallRequest(number, BatchCall() as batch):
                self._start(number, exchange(self._http, batch))
            case CallRequest(number, RemoteCall() as call):
                relay = self._relays.setdefault(call.worker, Relay(call.worker, call.number))
                self._start(number, relay.call(call))
            case CallRequest(number, list() as sequences):
                self._start(number, self._texts(sequences))
            case SetTokenizer(tokenizer_json):
                self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
            case CallRequest(number, None) if number in self._running:
                self._running[number].cancel()
            case Free(ranges):
                for first, num_bytes in ranges:
                    self._file.free(first, num_bytes)
            case str() if message == PING:
                self._send(message)

    def _start(self, number: int, work: Awaitable[Any]) -> None:
        self._running[number] = asyncio.create_task(self._reply(number, work))

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _texts(self, sequences: Sequence[TokenParts]) -> list[str]:
        if self._tokenizer is None:
            raise ValueError("no tokenizer was set before the first texts")
        texts = []
        for sequence in sequences:
            texts.append(self._tokenizer.decode(np.asarray(sequence).tolist(), skip_special_tokens=True))
            await asyncio.sleep(0)  # let other calls proceed
        return texts

    async def _reply(self, number: int, work: Awaitable[Any]) -> None:
        started_s = self._loop.time()
        try:
            reply = CallReply(number, await work)
        except Exception as error:  # any failure must reach the owner, which waits for a reply
            reply = CallReply(number, error=error)
        finally:
            del self._running[number]
        self._send(reply, min(_MAX_WAIT_S, _WAIT_SHARE * (self._loop.time() - started_s)))

    def _send(self, message: Any, wait_s: float = 0.0) -> None:
        """Send a message within ``wait_s``, together with others."""
        self._ready.append(message)
        due_s = self._loop.time() + wait_s
        if self._writes is None or due_s < self._writes.when():
            if self._writes is not None:
                self._writes.cancel()
            self._writes = self._loop.call_at(due_s, self._write)

    def _write(self) -> None:
        ready, self._ready, self._writes = self._ready, [], None
        for start in range(0, len(ready), MESSAGES_PER_TURN):
            self._writer.writelines(self._frame(ready[start : start + MESSAGES_PER_TURN]))

    def _frame(self, messages: list[Any]) -> list[bytes | memoryview]:
        try:
            return frame(messages, self._range_of(messages))
        except Exception as error:  # a foreign exception may refuse to be pickled
            if len(messages) > 1:
                return [part for message in messages for part in self._frame([message])]
            (reply,) = messages
            text = f"{type(error).__name__}: {error}; the reply was the error {reply.error!r}"
            return frame([CallReply(reply.number, error=RuntimeError(text))], self._file.put)

    def _range_of(self, messages: Sequence[Any]) -> RangeOf:
        """Function that puts an array of ``messages`` into this worker's file, unless another worker's file has it."""
        if self._is_remote:
            large = {start for message in messages for start in _routes_of(message)}
            return lambda raw: self._file.put(raw) if _start_of(raw) in large else None

        def put_if_local(raw: memoryview) -> ArrayRange:
            remote = (relay.range_of(raw) for relay in self._relays.values())
            return next(filter(None, remote), None) or self._file.put(raw)

        return put_if_local if self._relays else self._file.put


def _routes_of(message: Any) -> set[int]:
    """Memory addresses of the routes in a message."""
    samples = message.result.samples if isinstance(message, CallReply) and isinstance(message.result, BatchReply) else ()
    return {_start_of(one.routes) for one in samples if isinstance(one, Generation) and one.routes is not None}


def _start_of(array: Any) -> int:
    start: int = np.asarray(array).__array_interface__["data"][0]
    return start


async def serve(connection: socket.socket, file: SharedFile) -> None:
    """Serve calls until the owner closes the connection."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=STREAM_BYTES)
    async with HttpSession() as http:
        await _serve(_CallHandler(http, file, writer), reader, file)


async def _serve(handler: _CallHandler, reader: asyncio.StreamReader, file: SharedFile) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            for message in await read_frame(reader, file.at):
                handler.handle(message)
    await handler.close()


async def listen(listener: socket.socket, file: SharedFile, secret: bytes) -> None:
    """Serve calls of every process that sends the secret."""
    async with HttpSession() as http:

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, OSError, TimeoutError):
                async with asyncio.timeout(_SECRET_TIMEOUT_S):
                    known = is_secret(await reader.readexactly(SECRET_BYTES), secret)
                if known:  # checked before the first pickle is read
                    await _serve(_CallHandler(http, file, writer, is_remote=True), reader, file)

        async with await asyncio.start_server(connected, sock=listener, limit=STREAM_BYTES) as server:
            await server.serve_forever()


def main(arguments: list[str]) -> None:
    parent_pid, mode, socket_fd, file_fd = arguments
    begin_child(int(parent_pid))
    process_probe.enable_probe("rollout worker")
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)  # a reply is one list per token until it has been parsed
    connection = socket.socket(fileno=int(socket_fd))
    if mode == "listen":
        asyncio.run(listen(connection, SharedFile(int(file_fd)), read_secret()))
    else:
        asyncio.run(serve(connection, SharedFile(int(file_fd))))
    os._exit(0)  # nothing is left to clean up, and the interpreter's exit takes time


if __name__ == "__main__":
    main(sys.argv[1:])
