"""One publish in progress at the servers: its session, the buckets that they are asked for, and what to say when it fails."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.weights.buckets import TensorStreamError
from megatron_rl.weights.server_calls import ServerCallError, ServerCalls, wait_for_all

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 3.0
"""Given to servers that are left."""


@dataclass(frozen=True)
class UpdateRequest:
    """What the servers are asked for one bucket, and how its bytes set out."""

    path: str
    bodies: tuple[dict[str, Any], ...]
    """One per server."""
    num_bytes: int
    start: Callable[[ServerCalls], list[Future]]
    """Called once the servers have been asked; returns what is left to be waited for."""
    needs_session: bool = True
    """Whether the server takes it only between /begin_weight_update and /end_weight_update."""


@dataclass
class PublishTransfer:
    """One publish in progress: counts what was sent and turns a failure into a message."""

    calls: ServerCalls
    version: int
    started: float
    num_bytes: int = 0
    num_buckets: int = 0
    buffer_bytes: int = 0
    touched: bool = False
    """Some server may hold other weights than before."""
    _in_flight: deque[tuple[int, list[Future]]] = field(default_factory=deque)
    """Buckets by their number, and what of them is to be waited for."""

    def begin(self) -> None:
        """Open a session on every server; one that a failed publish left open is closed first."""
        self.calls.pause()
        if all(self.calls.accepts("/begin_weight_update")):
            return
        self.calls.accepts("/end_weight_update")
        self.calls.post("/begin_weight_update")

    def end(self) -> None:
        """Close the session on every server."""
        self.calls.post("/end_weight_update")

    def send_all(self, requests: Iterator[UpdateRequest]) -> None:
        """Ask the servers for one bucket after the other, in a session where they need one; raises what ``requests`` does."""
        session_open = False
        try:
            for request in requests:
                if request.needs_session and not session_open:
                    self.begin()
                    session_open = True
                self._start(request)
                self._wait_for_all_but(1)  # and the source fills the memory of the one before, meanwhile
        except (TensorStreamError, ValueError):
            # Let the bucket in progress arrive: a broken broadcast would only hide the real error.
            self._wait_for_all_but(0)
            raise
        self._wait_for_all_but(0)
        if session_open:
            self.end()

    def check_version(self) -> None:
        """Raises ServerCallError for a server that does not show the version published."""
        for server, info in zip(self.calls.servers, self.calls.get("/model_info"), strict=True):
            if info["weight_version"] != str(self.version):
                raise ServerCallError(
                    f"{server.url} took every bucket but shows weight version {info['weight_version']!r} instead of "
                    f"{str(self.version)!r}: something else updates its weights too, or it was restarted meanwhile"
                )

    def describe_failure(self, error: Exception) -> str:
        after_s = time.perf_counter() - self.started
        where = f"at bucket {self.num_buckets} (byte {self.num_bytes})" if self.num_buckets else "before any bucket"
        if self.touched:
            state = "Servers may hold a mix of old and new weights: publish again before anything is generated."
        else:
            state = "The servers keep their old weights."
        return f"weight sync of version {self.version} failed after {after_s:.1f} s {where}: {error}. {state}"

    def free_servers(self) -> None:
        """After a failure: paused ones go on. Where weights may have changed, what ran is aborted, and no version is shown."""
        if not self.calls.paused:
            return
        no_version = {"new_version": f"not {self.version}", "abort_all_requests": True}
        asked = [("/update_weight_version", no_version)] if self.touched else []
        # Soon: one that hangs, or is gone, is not waited for.
        with ServerCalls(self.calls.servers, min(self.calls.timeout_s, CLOSE_TIMEOUT_S)) as calls:
            for path, body in (*asked, ("/continue_generation", {})):
                try:
                    calls.post(path, body)
                except ServerCallError as error:
                    logger.warning("after a publish that failed: %s", error)

    def _start(self, request: UpdateRequest) -> None:
        self.touched = True
        self.num_buckets += 1
        self.num_bytes += request.num_bytes
        futures = self.calls.submit(request.path, request.bodies)
        self._in_flight.append((self.num_buckets, futures + request.start(self.calls)))

    def _wait_for_all_but(self, num_buckets: int) -> None:
        """Until at most so many, the last ones, are in progress."""
        while len(self._in_flight) > num_buckets:
            number, futures = self._in_flight.popleft()
            wait_for_all(futures, self.calls.timeout_s, f"the servers to receive and load bucket {number}")
