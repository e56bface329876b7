"""The rollout workers of a client: processes of this machine that make its calls to the servers.

A server's calls are made by one worker, over the connections that it keeps; a worker serves several servers. It starts
with its first call. One that dies, or whose event loop does not turn for ``_SILENCE_S``, is killed and started again
with the next call; callers who wait for it get ``WorkerLost``, and may send their request again under another id: the
server aborts the first one with its connection. One that dies ``_MAX_DEATHS`` times without a reply in between is given
up (``WorkerGivenUp``).

Who waits for whom: ``call`` for the worker, which keeps the call's time limit and shows that its event loop turns. A
worker waits for nobody but servers, and ends with the process that started it. One pool belongs to one event loop.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rl.data.trajectory import TokenParts
from megatron_rl.errors import UserError
from megatron_rl.rollout.sglang.exchange import BatchCall, BatchReply
from megatron_rl.rollout.workers.worker_frames import STREAM_BYTES, frame, read_frame
from megatron_rl.rollout.workers.worker_messages import Alive, Ask, Cancel, Drop, Reply, Texts, Vocabulary
from megatron_rl.system.shared_file import SharedView

_SILENCE_S = 120.0
_MAX_DEATHS = 5
_TEXTS_AT_ONCE = 32
_AT_ONCE = 64
"""Messages in one turn of the event loop, in either direction."""
_END_TIMEOUT_S = 10.0
"""From a kill to the end of the process."""


class WorkerLost(UserError, RuntimeError):
    """The worker that made the call is gone; the server is not at fault. Worth another try, under other request ids."""


class WorkerGivenUp(UserError, RuntimeError):
    """It died too often, and will not be started again."""


class WorkerPool:
    """A ``BatchCaller`` in other processes."""

    def __init__(self, num_workers: int, warn: Callable[[str], None]) -> None:
        self._workers = [_Worker(index, warn) for index in range(num_workers)]
        self._places: dict[str, int] = {}

    async def call(self, batch: BatchCall) -> BatchReply:
        """As ``BatchCaller.call``; also raises WorkerLost and WorkerGivenUp."""
        place = self._places.setdefault(batch.url, len(self._places) % len(self._workers))
        return await self._workers[place].ask(batch)

    async def texts(self, tokenizer_json: str, sequences: Sequence[TokenParts]) -> list[str]:
        """What the sequences say, without special tokens. Raises WorkerGivenUp."""
        # Each worker a few at a time: none keeps the servers' answers waiting, and none gets all the long ones.
        parts = [sequences[start : start + _TEXTS_AT_ONCE] for start in range(0, len(sequences), _TEXTS_AT_ONCE)]
        found = list[list[str]]([[]] * len(parts))
        left = iter(enumerate(parts))

        async def ask(worker: _Worker) -> None:
            for index, part in left:
                found[index] = await worker.texts(tokenizer_json, part)

        await asyncio.gather(*[ask(worker) for worker in self._workers])
        return [text for part in found for text in part]

    async def close(self) -> None:
        """Ends the calls in progress (the servers abort them) and the workers."""
        await asyncio.gather(*[worker.close() for worker in self._workers])

    @property
    def pids(self) -> list[int]:
        """Of the workers that run."""
        return [worker.pid for worker in self._workers if worker.pid]


class _Worker:
    """One worker after the other, under the same number."""

    def __init__(self, index: int, warn: Callable[[str], None]) -> None:
        self._index = index
        self._warn = warn
        self._process: _Process | None = None
        self._starting = asyncio.Lock()
        self._num_deaths = 0
        """Since the last reply."""
        self._last_death = ""

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def ask(self, question: Any, tokenizer_json: str = "") -> Any:
        process = await self._running()
        if tokenizer_json:
            process.learn(tokenizer_json)
        answer = await process.ask(question)
        self._num_deaths = 0
        return answer

    async def texts(self, tokenizer_json: str, sequences: Sequence[TokenParts]) -> list[str]:
        while True:
            with contextlib.suppress(WorkerLost):
                return await self.ask(Texts(sequences), tokenizer_json)

    async def _running(self) -> "_Process":
        async with self._starting:
            if self._process is None:
                if self._num_deaths >= _MAX_DEATHS:
                    raise WorkerGivenUp(
                        f"rollout worker {self._index} {self._last_death}, {self._num_deaths} times without a reply in "
                        "between, and is not started again. Look for its traceback above and for the kernel's "
                        "out-of-memory messages (dmesg); rollout.num_workers=0 makes the calls in the driver instead"
                    )
                self._process = await _Process.start(self._ended)
            return self._process

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.close()

    def _ended(self, process: "_Process", how: str) -> None:
        """Unless it was closed."""
        if self._process is not process:
            return
        self._process = None
        self._num_deaths += 1
        self._last_death = f"(process {process.pid}) {how}"
        self._warn(
            f"rollout worker {self._index} {self._last_death}; it is started again, and its {process.num_waiting} "
            "requests in progress are sent again"
        )


class _Process:
    """From its start to its end."""

    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _tasks: list[asyncio.Task[None]]
    """Since ``start``."""

    def __init__(self, process: subprocess.Popen[bytes], file_fd: int, on_end: "Callable[[_Process, str], None]") -> None:
        self.pid = process.pid
        self._process = process
        self._file_fd = file_fd
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._file = SharedView(file_fd, self._drop)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._outgoing: list[Any] = []
        self._numbers = itertools.count()
        self._heard_at = time.monotonic()
        self._over = False
        self._killed_for = ""
        self._tokenizer_json = ""

    @classmethod
    async def start(cls, on_end: "Callable[[_Process, str], None]") -> "_Process":
        ours, theirs = socket.socketpair()
        file_fd = os.memfd_create("megatron_rl_rollout")
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "megatron_rl.rollout.workers.worker_process",
                    *map(str, (theirs.fileno(), file_fd, os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), file_fd),
                start_new_session=True,  # a Ctrl-C in the terminal is the driver's to handle
                env=dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
            )
        self = cls(process, file_fd, on_end)
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=STREAM_BYTES)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        return self

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def ask(self, question: Any) -> Any:
        if self._over:
            await asyncio.wait(self._tasks[:1])  # its successor can start then
            raise WorkerLost(f"rollout worker (process {self.pid}) is gone")
        number = next(self._numbers)
        waiting = self._waiting[number] = self._loop.create_future()
        self._send(Ask(number, question))
        try:
            return await waiting
        except asyncio.CancelledError:
            self._send(Cancel(number))
            raise
        finally:
            self._waiting.pop(number, None)

    def learn(self, tokenizer_json: str) -> None:
        """For texts, once."""
        if self._tokenizer_json is not tokenizer_json:
            self._tokenizer_json = tokenizer_json
            self._send(Vocabulary(tokenizer_json))

    async def close(self) -> None:
        self._over = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for waiting in self._waiting.values():
            waiting.cancel()
        self._writer.close()
        await self._end()

    def _send(self, message: Any) -> None:
        """With all that is sent in this turn of the event loop."""
        if not self._over:
            self._outgoing.append(message)
            if len(self._outgoing) == 1:
                self._loop.call_soon(self._write)

    def _write(self) -> None:
        messages, self._outgoing = self._outgoing[:_AT_ONCE], self._outgoing[_AT_ONCE:]
        if self._outgoing:
            self._loop.call_soon(self._write)
        if self._over:
            return
        try:
            self._writer.writelines(frame(messages, self._file.place_of))
        except Exception as error:  # of what cannot be pickled: its caller, not the event loop, has to know
            for message in messages:
                if isinstance(message, Ask) and (waiting := self._waiting.get(message.number)) and not waiting.done():
                    waiting.set_exception(error)

    def _drop(self, start: int) -> None:
        """On any thread."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed: so is the worker
            self._loop.call_soon_threadsafe(self._send, Drop(start))

    async def _read(self) -> None:
        """Replies, until the worker's end of the connection is closed."""
        failure = ""
        try:
            for number in itertools.count(1):
                message = await read_frame(self._reader, self._file)
                self._heard_at = time.monotonic()
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(0)  # reading what is there already does not let others run
                if isinstance(message, Reply) and (waiting := self._waiting.get(message.number)) and not waiting.done():
                    if message.error is not None:
                        waiting.set_exception(message.error)
                    else:
                        waiting.set_result(message.answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:  # nobody may wait forever, whatever came
            failure = f"sent what cannot be read ({type(error).__name__}: {error})"
        self._over = True
        self._writer.close()
        status = await self._end()
        how = failure or self._killed_for or _how_it_ended(status)
        self._on_end(self, how)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(WorkerLost(f"rollout worker (process {self.pid}) {how}"))

    async def _watch(self) -> None:
        """Kill a worker that has calls in progress and whose event loop stands still."""
        while not self._over:
            asked_at = time.monotonic()
            self._send(Alive())
            await asyncio.sleep(_SILENCE_S)
            if self._heard_at < asked_at:
                self._kill(f"did nothing for {_SILENCE_S:.0f} s")
                return

    def _kill(self, why: str) -> None:
        self._killed_for = f"was killed: it {why}"
        self._process.kill()

    async def _end(self) -> int | None:
        """Its exit status, once it has ended; it does so by itself when the connection is closed."""
        if not self._killed_for:
            await asyncio.to_thread(self._wait_or_kill)
        else:
            await asyncio.to_thread(self._wait)
        os.close(self._file_fd)
        return self._process.returncode

    def _wait_or_kill(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S / 2)
            return
        self._process.kill()
        self._wait()

    def _wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)


def _how_it_ended(status: int | None) -> str:
    if status is None:
        return "does not end"
    return f"died of {signal.Signals(-status).name}" if status < 0 else f"exited with code {status}"
