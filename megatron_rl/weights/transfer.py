"""State of one publish on the servers: the update session, the requests for buckets, and the failure message."""

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
"""Timeout of cleanup calls to servers."""


@dataclass(frozen=True)
class UpdateRequest:
    """HTTP request for one bucket, and the function that starts the transfer of its bytes."""

    path: str
    bodies: tuple[dict[str, Any], ...]
    """One request body per server."""
    num_bytes: int
    start: Callable[[ServerCalls], list[Future]]
    """Called after the requests have been submitted; returns further futures to wait for."""
    needs_session: bool = True
    """True if servers accept the request only between /begin_weight_update and /end_weight_update."""


@dataclass
class PublishTransfer:
    """One publish in progress: sends the buckets, counts them, and turns a failure into a message."""

    calls: ServerCalls
    version: int
    started: float
    num_bytes: int = 0
    num_buckets: int = 0
    buffer_bytes: int = 0
    touched: bool = False
    """True once the weights of some server may have changed."""
    _in_flight: deque[tuple[int, list[Future]]] = field(default_factory=deque)
    """Numbers of the buckets in progress, with their futures."""

    def begin(self) -> None:
        """Open a session on every server, after closing sessions that a failed publish left open."""
        self.calls.pause()
        if all(self.calls.accepts("/begin_weight_update")):
            return
        self.calls.accepts("/end_weight_update")
        self.calls.post("/begin_weight_update")

    def end(self) -> None:
        """Close the session on every server."""
        self.calls.post("/end_weight_update")

    def send_all(self, requests: Iterator[UpdateRequest]) -> None:
        """Send the buckets of ``requests`` in sequence, in a session if a request needs one.

        Raises ServerCallError, and the exceptions of ``requests``.
        """
        session_open = False
        try:
            for request in requests:
                if request.needs_session and not session_open:
                    self.begin()
                    session_open = True
                self._start(request)
                self._wait_for_all_but(1)  # the source meanwhile fills the memory of the previous bucket
        except (TensorStreamError, ValueError):
            # Complete the bucket in progress, because an aborted broadcast would hide the real error.
            self._wait_for_all_but(0)
            raise
        self._wait_for_all_but(0)
        if session_open:
            self.end()

    def stamp_version(self) -> None:
        """Set the version of servers that have the weights already, and check it. Raises ServerCallError."""
        self.calls.post("/update_weight_version", {"new_version": str(self.version), "abort_all_requests": False})
        self.check_version()

    def check_version(self) -> None:
        """Raise ServerCallError if a server does not report the published version."""
        for server, info in zip(self.calls.servers, self.calls.get("/model_info"), strict=True):
            if info["weight_version"] != str(self.version):
                raise ServerCallError(
                    f"{server.url} took every bucket but shows weight version {info['weight_version']!r} instead of "
                    f"{str(self.version)!r}: another process also updates its weights, or the server was restarted meanwhile"
                )

    def describe_failure(self, error: Exception) -> str:
        after_s = time.perf_counter() - self.started
        where = f"at bucket {self.num_buckets} (byte {self.num_bytes})" if self.num_buckets else "before any bucket"
        if self.touched:
            state = "Servers may have a mix of old and new weights: publish again before generating."
        else:
            state = "The servers keep their old weights."
        return f"weight sync of version {self.version} failed after {after_s:.1f} s {where}: {error}. {state}"

    def free_servers(self) -> None:
        """Resume paused servers after a failure.

        If weights may have changed, running requests are aborted first and the servers' version is invalidated.
        """
        if not self.calls.paused:
            return
        no_version = {"new_version": f"not {self.version}", "abort_all_requests": True}
        invalidation = [("/update_weight_version", no_version)] if self.touched else []
        # A short timeout, so that a server that hangs or is gone does not delay the error.
        with ServerCalls(self.calls.servers, min(self.calls.timeout_s, CLOSE_TIMEOUT_S)) as calls:
            for path, body in (*invalidation, ("/continue_generation", {})):
                try:
                    calls.post(path, body)
                except ServerCallError as error:
                    logger.warning("after a failed publish: %s", error)

    def _start(self, request: UpdateRequest) -> None:
        # Set before the request is sent, because a server may fail after it has begun to load.
        self.touched = True
        self.num_buckets += 1
        self.num_bytes += request.num_bytes
        futures = self.calls.submit(request.path, request.bodies)
        self._in_flight.append((self.num_buckets, futures + request.start(self.calls)))

    def _wait_for_all_but(self, num_buckets: int) -> None:
        """Wait until only the last ``num_buckets`` buckets are in progress."""
        while len(self._in_flight) > num_buckets:
            number, futures = self._in_flight.popleft()
            wait_for_all(futures, self.calls.timeout_s, f"the servers to receive and load bucket {number}")
