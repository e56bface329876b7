"""A connection between two processes, one of which asks and the other answers (``worker_messages.py``).

Who waits for whom: a caller of ``ask`` for the other process, which has to show every ``silence_s`` that its event loop
turns. Once the connection has ended, for whatever reason, every caller gets ``WorkerLost``.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Any, Protocol

from megatron_rl.rollout.workers.worker_frames import ArrayLocator, frame, read_frame
from megatron_rl.rollout.workers.worker_messages import CallReply, CallRequest, Cancel, Ping
from megatron_rl.system.files.shared_file import ArrayRange

SILENCE_S = 120.0
_LOOKS = 8
"""At the other end in that time."""
AT_ONCE = 64
"""Messages in one turn of the event loop, in either direction."""


class OutgoingArrays(ArrayLocator, Protocol):
    def range_of(self, raw: memoryview) -> ArrayRange | None: ...


class WorkerConnection:
    """The asking end. One belongs to one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, arrays: OutgoingArrays) -> None:
        self._reader, self._writer, self._arrays = reader, writer, arrays
        self.loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._outgoing: list[Any] = []
        self._writing: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._heard_at = time.monotonic()
        self.over = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def ask(self, question: Any) -> Any:
        number = next(self._numbers)
        waiting = self._waiting[number] = self.loop.create_future()
        self.send(CallRequest(number, question))
        try:
            return await waiting
        except asyncio.CancelledError:
            self.send(Cancel(number))
            raise
        finally:
            self._waiting.pop(number, None)

    def send(self, message: Any) -> None:
        """With all that is sent in this turn of the event loop."""
        if not self.over:
            self._outgoing.append(message)
            if self._writing is None:
                self._writing = self.loop.create_task(self._write())

    async def read(self) -> str:
        """Replies, until the other end of the connection is closed; gives what was wrong with it, if anything was."""
        failure, num_read = "", 0
        try:
            while True:
                num_read += self._take(await read_frame(self._reader, self._arrays))
                if num_read >= AT_ONCE:
                    num_read = 0
                    await asyncio.sleep(0)  # reading what is there already does not let others run
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:  # nobody may wait forever, whatever came
            failure = f"sent what cannot be read ({type(error).__name__}: {error})"
        self.over = True
        self._writer.close()
        return failure

    def _take(self, messages: list[Any]) -> int:
        """How many there were. Nothing refers to them while the next ones are waited for."""
        self._heard_at = time.monotonic()
        for message in messages:
            if isinstance(message, CallReply) and (waiting := self._waiting.get(message.number)) and not waiting.done():
                if message.error is not None:
                    waiting.set_exception(message.error)
                else:
                    waiting.set_result(message.answer)
        return len(messages)

    async def seconds_since_reply(self, silence_s: Callable[[], float]) -> None:
        """Returns once the other event loop has stood still for ``silence_s()``, or the connection has ended."""
        while not self.over:
            asked_at = time.monotonic()
            self.send(Ping())
            while not self.over:
                await asyncio.sleep(silence_s() / _LOOKS)
                if self._heard_at >= asked_at:
                    break
                if time.monotonic() - asked_at >= silence_s():
                    return

    def lose(self, error: Exception) -> None:
        """All that wait get this."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)

    def close(self) -> None:
        self.over = True
        for waiting in self._waiting.values():
            waiting.cancel()
        if self._writing is not None:
            self._writing.cancel()
        with contextlib.suppress(RuntimeError):  # the event loop may be closed
            self._writer.transport.abort()  # what was not sent yet may never be taken

    async def _write(self) -> None:
        """All that waits, as fast as the other end takes it: what is buffered here is copied again and again."""
        while self._outgoing and not self.over:
            messages, self._outgoing = self._outgoing[:AT_ONCE], self._outgoing[AT_ONCE:]
            try:
                self._writer.writelines(frame(messages, self._arrays.range_of))
            except Exception as error:  # of what cannot be pickled: its caller, not the event loop, has to know
                for message in messages:
                    if isinstance(message, CallRequest) and (waiting := self._waiting.get(message.number)) and not waiting.done():
                        waiting.set_exception(error)
            with contextlib.suppress(ConnectionError):  # ``read`` sees it too
                await self._writer.drain()
            await asyncio.sleep(0)  # which the line before does only where the other end is slow
        self._writing = None
