"""A rollout worker: ``python -m megatron_rl.rollout.workers.worker_process PARENT serve SOCKET FILE`` (a pid and two fds).

It makes the calls that its owner sends (``worker_pool.py``), all at once, or passes them on to a worker of another node,
and sends each reply back; it also decodes tokens. It ends when its owner closes the connection or is gone, and leaves every
signal to it.

A worker of another node (``listen`` in place of ``serve``; the secret comes on stdin) does the same for all that connect and
know the secret, but what is large, the routes, stays in its file there. It ends with the process that started it.
"""

import asyncio
import contextlib
import gc
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import tokenizers

from megatron_rl.data.trajectory import TokenParts
from megatron_rl.rollout.requests import BatchCall, BatchReply, Generation
from megatron_rl.rollout.sglang.wire.batch_call import exchange
from megatron_rl.rollout.workers.remote_calls import Relay, RemoteCall, RemoteWorkerInfo
from megatron_rl.rollout.workers.worker_connection import AT_ONCE
from megatron_rl.rollout.workers.worker_frames import STREAM_BYTES, frame, read_frame
from megatron_rl.rollout.workers.worker_messages import (
    CallReply,
    CallRequest,
    Cancel,
    DetokenizeRequest,
    Free,
    Ping,
    SetTokenizer,
)
from megatron_rl.system.files.shared_file import ArrayRange, SharedFile
from megatron_rl.system.http.json_http import HttpSession
from megatron_rl.system.processes import process_probe
from megatron_rl.system.processes.child_process import SECRET_BYTES, begin_child, is_secret, read_secret

_WAIT_SHARE = 0.01
"""A reply waits for others at most this share of what its call took: waking the owner costs it more than reading one does."""
_MAX_WAIT_S = 0.25
_SECRET_TIMEOUT_S = 30.0


class _CallHandler:
    """The calls of one owner."""

    def __init__(self, http: HttpSession, file: SharedFile, writer: asyncio.StreamWriter, *, is_far: bool = False) -> None:
        self._is_far = is_far
        self._relays: dict[RemoteWorkerInfo, Relay] = {}
        self._http = http
        self._file = file
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ready: list[Any] = []
        """Messages that wait for others."""
        self._writes: asyncio.TimerHandle | None = None
        self._tokenizer: tokenizers.Tokenizer | None = None

    def take(self, message: Any) -> None:
        match message:
            case CallRequest(number, BatchCall() as batch):
                self._running[number] = asyncio.create_task(self._answer(number, exchange(self._http, batch)))
            case CallRequest(number, RemoteCall() as call):
                relay = self._relays.setdefault(call.worker, Relay(call.worker, call.number))
                self._running[number] = asyncio.create_task(self._answer(number, relay.call(call)))
            case CallRequest(number, DetokenizeRequest(sequences)):
                self._running[number] = asyncio.create_task(self._answer(number, self._texts(sequences)))
            case SetTokenizer(tokenizer_json):
                self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
            case Cancel(number) if number in self._running:
                self._running[number].cancel()
            case Free(ranges):
                for first, num_bytes in ranges:
                    self._file.free(first, num_bytes)
            case Ping():
                self._send(message)

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _texts(self, sequences: Sequence[TokenParts]) -> list[str]:
        if self._tokenizer is None:
            raise ValueError("no tokenizer came before the first texts")
        texts = []
        for sequence in sequences:
            texts.append(self._tokenizer.decode(np.asarray(sequence).tolist(), skip_special_tokens=True))
            await asyncio.sleep(0)  # others read and answer meanwhile
        return texts

    async def _answer(self, number: int, work: Awaitable[Any]) -> None:
        began_s = self._loop.time()
        try:
            reply = CallReply(number, await work)
        except Exception as error:  # whatever it is, the owner waits for it
            reply = CallReply(number, error=error)
        finally:
            del self._running[number]
        self._send(reply, min(_MAX_WAIT_S, _WAIT_SHARE * (self._loop.time() - began_s)))

    def _send(self, message: Any, wait_s: float = 0.0) -> None:
        """Within ``wait_s``, with others."""
        self._ready.append(message)
        due_s = self._loop.time() + wait_s
        if self._writes is None or due_s < self._writes.when():
            if self._writes is not None:
                self._writes.cancel()
            self._writes = self._loop.call_at(due_s, self._write)

    def _write(self) -> None:
        ready, self._ready, self._writes = self._ready, [], None
        for start in range(0, len(ready), AT_ONCE):
            self._writer.writelines(self._frame(ready[start : start + AT_ONCE]))

    def _frame(self, messages: list[Any]) -> list[bytes | memoryview]:
        try:
            return frame(messages, self._range_of(messages))
        except Exception as error:  # a foreign exception may refuse to be pickled
            if len(messages) > 1:
                return [part for message in messages for part in self._frame([message])]
            (reply,) = messages
            text = f"{type(error).__name__}: {error}, of a reply {reply.error!r}"
            return frame([CallReply(reply.number, error=RuntimeError(text))], self._file.put)

    def _range_of(self, messages: Sequence[Any]) -> Callable[[memoryview], ArrayRange | None]:
        """Puts the messages' arrays into this worker's file, unless they lie in another worker's already."""
        if self._is_far:
            large = {start for message in messages for start in _routes_of(message)}
            return lambda raw: self._file.put(raw) if _start_of(raw) in large else None

        def found(raw: memoryview) -> ArrayRange:
            elsewhere = (relay.range_of(raw) for relay in self._relays.values())
            return next(filter(None, elsewhere), None) or self._file.put(raw)

        return found if self._relays else self._file.put


def _routes_of(message: Any) -> set[int]:
    """Memory addresses of the routes in a message."""
    samples = message.answer.samples if isinstance(message, CallReply) and isinstance(message.answer, BatchReply) else ()
    return {_start_of(one.routes) for one in samples if isinstance(one, Generation) and one.routes is not None}


def _start_of(array: Any) -> int:
    start: int = np.asarray(array).__array_interface__["data"][0]
    return start


async def serve(connection: socket.socket, file: SharedFile) -> None:
    """Serve calls until the owner closes the connection."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=STREAM_BYTES)
    async with HttpSession() as http:
        await _serve(_CallHandler(http, file, writer), reader, file)


async def _serve(server: _CallHandler, reader: asyncio.StreamReader, file: SharedFile) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            for message in await read_frame(reader, file):
                server.take(message)
    await server.close()


async def listen(listener: socket.socket, file: SharedFile, secret: bytes) -> None:
    """For all who know the secret."""
    async with HttpSession() as http:

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, OSError, TimeoutError):
                async with asyncio.timeout(_SECRET_TIMEOUT_S):
                    known = is_secret(await reader.readexactly(SECRET_BYTES), secret)
                if known:  # before the first pickle is read
                    await _serve(_CallHandler(http, file, writer, is_far=True), reader, file)

        async with await asyncio.start_server(connected, sock=listener, limit=STREAM_BYTES) as server:
            await server.serve_forever()


def main(arguments: list[str]) -> None:
    parent_pid, mode, socket_fd, file_fd = arguments
    begin_child(int(parent_pid))
    process_probe.enable_probe("rollout worker")
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)  # an answer is one list per token until it has been read
    connection = socket.socket(fileno=int(socket_fd))
    if mode == "listen":
        asyncio.run(listen(connection, SharedFile(int(file_fd)), read_secret()))
    else:
        asyncio.run(serve(connection, SharedFile(int(file_fd))))
    os._exit(0)  # nothing is left to do, and modules need a while to say goodbye


if __name__ == "__main__":
    main(sys.argv[1:])
