"""A server that somebody else started: watched, never stopped."""

import logging
import time
from collections.abc import Callable
from typing import Any

from megatron_rl.rollout.sglang.server import Progress, ServerError, is_healthy
from megatron_rl.system.http import HttpError, get_once

logger = logging.getLogger(__name__)

_POLL_S = 1.0


class AttachedServer:
    """As SglangServer, but ``restart`` waits until others have started the server again, and ``stop`` does nothing."""

    def __init__(self, url: str, *, timeout_s: float = 300.0, progress: Progress = logger.info) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.incarnation = 1
        self._progress = progress
        self._identity = self._read_identity()

    def healthy(self, timeout_s: float = 5.0) -> bool:
        """The server answers; notices when it is not the process that answered before."""
        if not is_healthy(self.url, timeout_s):
            return False
        identity = self._read_identity()
        # Another process under the same URL: it has neither the process group nor the weights of the one before.
        if identity != self._identity:
            self._identity = identity
            self.incarnation += 1
        return True

    def restart(self, while_waiting: Callable[[], None] = lambda: None) -> None:
        """Wait until whoever runs the server has started it again. Raises ServerError after ``timeout_s``."""
        deadline = time.monotonic() + self.timeout_s
        self._progress(f"waiting up to {self.timeout_s:.0f} s for server {self.url}, which this run did not start")
        while not self.healthy():
            if time.monotonic() > deadline:
                raise ServerError(
                    f"server {self.url} did not come back within {self.timeout_s:.0f} s; this run attached to it and "
                    "cannot start it. Start it again, or take it out of rollout.urls."
                )
            time.sleep(_POLL_S)
            while_waiting()

    def stop(self, grace_s: float = 0.0) -> None:
        """Nothing: it is not ours."""

    def model_info(self) -> dict[str, Any]:
        """What the server says about its model. Raises ServerError if no SGLang server answers there."""
        return _ask(self.url, "/model_info")

    def _read_identity(self) -> tuple[Any, ...]:
        info = _ask(self.url, "/server_info")
        return tuple(info.get(name) for name in _IDENTITY_FIELDS)


_IDENTITY_FIELDS = ("startup_time", "random_seed", "launch_command")
"""Fields of /server_info that differ between two processes under the same URL."""


def _ask(url: str, path: str, timeout_s: float = 10.0) -> dict[str, Any]:
    try:
        answer = get_once(url + path, timeout_s=timeout_s)
        if answer.status == 200:
            return answer.json()
        problem = f"it answered {answer.status}: {answer.text[:200]}"
    except (HttpError, ValueError) as error:
        problem = f"{error}" if isinstance(error, HttpError) else f"{type(error).__name__}: {error}"
    raise ServerError(
        f"no SGLang server answers at {url} ({problem}). Expected {path} to answer within {timeout_s:.0f} s: check the "
        f"address in rollout.urls and that the server is up (GET {url}/health)."
    )
