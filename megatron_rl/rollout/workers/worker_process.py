"""A rollout worker: ``python -m megatron_rl.rollout.workers.worker_process SOCKET FILE PARENT`` (two fds and a pid).

It makes the calls that its owner sends (``worker_pool.py``), all at once, and sends each reply back; it also decodes
tokens. It ends when its owner closes the connection or is gone, and leaves every signal to it.
"""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Sequence
from typing import Any

import numpy as np
import tokenizers

from megatron_rl.data.trajectory import TokenParts
from megatron_rl.rollout.sglang.exchange import BatchCall, exchange
from megatron_rl.rollout.workers.worker_frames import STREAM_BYTES, frame, read_frame
from megatron_rl.rollout.workers.worker_messages import Alive, Ask, Cancel, Drop, Reply, Texts, Vocabulary
from megatron_rl.system import doing
from megatron_rl.system.http import HttpSession
from megatron_rl.system.shared_file import SharedFile
from megatron_rl.system.signals import STOP_SIGNALS, die_with_parent

_WAIT_SHARE = 0.01
"""A reply waits for others at most this share of what its call took: waking the owner costs it more than reading one does."""
_MAX_WAIT_S = 0.25


class _Server:
    """The calls of one owner."""

    def __init__(self, http: HttpSession, file: SharedFile, writer: asyncio.StreamWriter) -> None:
        self._http = http
        self._file = file
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ready: list[bytes | memoryview] = []
        """Of the frames that wait for others."""
        self._writes: asyncio.TimerHandle | None = None
        self._tokenizer: tokenizers.Tokenizer | None = None

    def take(self, message: Any) -> None:
        match message:
            case Ask(number, BatchCall() as batch):
                self._running[number] = asyncio.create_task(self._answer(number, exchange(self._http, batch)))
            case Ask(number, Texts(sequences)):
                self._running[number] = asyncio.create_task(self._answer(number, self._texts(sequences)))
            case Vocabulary(tokenizer_json):
                self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
            case Cancel(number) if number in self._running:
                self._running[number].cancel()
            case Drop(start):
                self._file.drop(start)
            case Alive():
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
            reply = Reply(number, await work)
        except Exception as error:  # whatever it is, the owner waits for it
            reply = Reply(number, error=error)
        finally:
            del self._running[number]
        wait_s = min(_MAX_WAIT_S, _WAIT_SHARE * (self._loop.time() - began_s))
        try:
            self._send(reply, wait_s)
        except Exception as error:  # a foreign exception may refuse to be pickled
            self._send(Reply(number, error=RuntimeError(f"{type(error).__name__}: {error}, of a reply {reply.error!r}")))

    def _send(self, message: Any, wait_s: float = 0.0) -> None:
        """Within ``wait_s``, with others."""
        self._ready += frame(message, self._file.put)
        due_s = self._loop.time() + wait_s
        if self._writes is None or due_s < self._writes.when():
            if self._writes is not None:
                self._writes.cancel()
            self._writes = self._loop.call_at(due_s, self._write)

    def _write(self) -> None:
        ready, self._ready, self._writes = self._ready, [], None
        self._writer.writelines(ready)


async def serve(connection: socket.socket, file: SharedFile) -> None:
    """Until the owner closes the connection."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=STREAM_BYTES)
    async with HttpSession() as http:
        server = _Server(http, file, writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                for message in await read_frame(reader, file):
                    server.take(message)
        await server.close()


def main(arguments: list[str]) -> None:
    socket_fd, file_fd, parent_pid = map(int, arguments)
    die_with_parent(parent_pid, signal.SIGKILL)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    doing.listen("rollout worker")
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)  # an answer is one list per token until it has been read
    asyncio.run(serve(socket.socket(fileno=socket_fd), SharedFile(file_fd)))
    os._exit(0)  # nothing is left to do, and modules need a while to say goodbye


if __name__ == "__main__":
    main(sys.argv[1:])
