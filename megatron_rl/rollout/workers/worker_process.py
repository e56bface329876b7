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


class _Server:
    """The calls of one owner."""

    def __init__(self, http: HttpSession, file: SharedFile, writer: asyncio.StreamWriter) -> None:
        self._http = http
        self._file = file
        self._writer = writer
        self._running: dict[int, asyncio.Task[None]] = {}
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
        try:
            reply = Reply(number, await work)
        except Exception as error:  # whatever it is, the owner waits for it
            reply = Reply(number, error=error)
        finally:
            del self._running[number]
        try:
            self._send(reply)
        except Exception as error:  # a foreign exception may refuse to be pickled
            self._send(Reply(number, error=RuntimeError(f"{type(error).__name__}: {error}, of a reply {reply.error!r}")))

    def _send(self, message: Any) -> None:
        self._writer.writelines(frame(message, self._file.put))


async def serve(connection: socket.socket, file: SharedFile) -> None:
    """Until the owner closes the connection."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=STREAM_BYTES)
    async with HttpSession() as http:
        server = _Server(http, file, writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                server.take(await read_frame(reader, file))
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
