"""Attached server, started by others: monitored, never stopped."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rl.rollout.requests import ServerError
from megatron_rl.rollout.sglang.process.liveness import generates_token
from megatron_rl.rollout.sglang.process.server import Progress, is_healthy
from megatron_rl.rollout.sglang.wire.response_validation import ApiKeyRejected, InvalidReply, as_object
from megatron_rl.system.http.json_http import HttpError, HttpThread, bearer, get_once
from megatron_rl.system.http.url_files import named_urls, urls_of_workers

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_TOKEN_TIMEOUT_S = 20.0
_GO_ON_TIMEOUT_S = 30.0


class AttachedServer:
    """Same interface as SglangServer, but ``restart`` waits until others have restarted the server, and ``stop`` does
    nothing."""

    is_ours = False

    def __init__(
        self, url: str, *, timeout_s: float = 300.0, api_key: str = "", progress: Progress = logger.info
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.incarnation = 1
        self.num_restarts = 0
        self._api_key = api_key
        self._progress = progress
        self._abandoned = threading.Event()
        behind = workers_behind(self.url, api_key)
        if behind is not None:
            raise ServerError(
                f"{self.url} is a router (sglang-router, SGLang Model Gateway), not a server. A run uses the servers behind a router "
                f"if it is the only entry of rollout.urls; next to other entries list them: {','.join(behind) or 'it has none'}"
            )
        self._identity = self._read_identity()

    def is_same(self, other: object) -> bool:
        """True if ``other`` is the same process under another address (a name, 127.0.0.1, another network)."""
        if not isinstance(other, AttachedServer) or all(part is None for part in self._identity):
            return False
        return self._identity == other._identity

    def healthy(self, timeout_s: float = 5.0) -> bool:
        """True if the server and its scheduler answer. Counts a new incarnation if another process answers."""
        try:
            if not is_healthy(self.url, timeout_s):
                return False
            identity = self._read_identity(timeout_s)
        except ServerError:
            return False
        # Another process under the same URL has neither the process group nor the weights of the previous one.
        if identity != self._identity:
            self._identity = identity
            self.incarnation += 1
        return True

    def restart(self, while_waiting: Callable[[], None] = lambda: None) -> None:
        """Wait until the server's owner has restarted it and it generates a token.

        Raises ServerError after ``timeout_s``, or once the run ends.
        """
        deadline = time.monotonic() + self.timeout_s
        self._progress(f"waiting up to {self.timeout_s:.0f} s for server {self.url}, which this run did not start")
        while not (self.healthy() and generates_token(self.url, api_key=self._api_key, timeout_s=_TOKEN_TIMEOUT_S)):
            if time.monotonic() > deadline:
                raise ServerError(
                    f"server {self.url} did not come back within {self.timeout_s:.0f} s; this run attached to it and "
                    "cannot start it. Restart it, or remove it from rollout.urls."
                )
            if self._abandoned.wait(_POLL_S):
                raise ServerError(f"stopped waiting for server {self.url}: the run ends")
            while_waiting()
        self.num_restarts += 1

    def abandon(self) -> None:
        """Stop waiting, because the run ends."""
        self._abandoned.set()

    def stop(self, grace_s: float = 0.0) -> None:
        """Does nothing: others own the server."""

    def go_on(self) -> None:
        """Resume generation if a run killed during a publish has left the server paused. Raises ServerError."""
        headers = bearer(self._api_key)
        try:
            with HttpThread() as http:
                url = self.url + "/continue_generation"
                answer = http.submit(http.session.post(url, {}, timeout_s=_GO_ON_TIMEOUT_S, headers=headers)).result()
        except HttpError as error:
            raise ServerError(f"server {self.url} did not answer /continue_generation ({error}); see its log") from error
        if answer.status != 200:
            raise ServerError(
                f"server {self.url} answered /continue_generation with {answer.status}: {answer.text[:200]}; a run that was killed "
                "may have left it paused: restart it"
            )

    def model_info(self) -> dict[str, Any]:
        """Model information of the server. Raises ServerError if no SGLang server answers."""
        return _ask(self.url, "/model_info", self._api_key)

    def server_info(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """Options of the running server, by SGLang's names. Raises ServerError as ``model_info``."""
        # The scheduler contributes to this reply, so a hung scheduler is noticed.
        return _ask(self.url, "/server_info", self._api_key, timeout_s)

    def _read_identity(self, timeout_s: float = 10.0) -> tuple[Any, ...]:
        info = self.server_info(timeout_s)
        return tuple(info.get(name) for name in _IDENTITY_FIELDS)


_IDENTITY_FIELDS = ("startup_time", "random_seed", "launch_command")
"""Fields of /server_info that differ between two processes under the same URL."""


def workers_behind(url: str, api_key: str, timeout_s: float = 10.0) -> list[str] | None:
    """URLs of the servers behind an sglang-router (SGLang Model Gateway); None if ``url`` is not a router."""
    try:
        answer = get_once(url + "/workers", timeout_s=timeout_s, headers=bearer(api_key))
        content = answer.json() if answer.status == 200 else None
    except (HttpError, ValueError, RecursionError):
        return None
    return urls_of_workers(content) if isinstance(content, dict) else None


def discovery_source(urls: Sequence[str], urls_file: str, api_key: str) -> str:
    """Source that lists a run's servers and is polled (``named_urls``): ``urls_file``, or a router that is the only
    entry of ``urls``.

    Empty if ``urls`` are the servers themselves.
    """
    if urls_file:
        return urls_file
    is_router = len(urls) == 1 and workers_behind(urls[0].rstrip("/"), api_key) is not None
    return urls[0].rstrip("/") if is_router else ""


def attached_urls(urls: Sequence[str], urls_file: str, api_key: str) -> list[str]:
    """URLs of the servers listed so far. Raises UserError and OSError as ``named_urls``."""
    named_by = discovery_source(urls, urls_file, api_key)
    return named_urls(named_by, api_key) if named_by else list(urls)


def _ask(url: str, path: str, api_key: str, timeout_s: float = 10.0) -> dict[str, Any]:
    try:
        answer = get_once(url + path, timeout_s=timeout_s, headers=bearer(api_key))
        if answer.status in (401, 403):
            raise ApiKeyRejected(url, answer.status, has_key=bool(api_key))
        if answer.status == 200:
            return as_object(answer.json(), path)
        problem = f"it answered {answer.status}: {answer.text[:200]}"
    except (HttpError, InvalidReply) as error:
        problem = str(error)
    except (ValueError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise ServerError(
        f"no SGLang server answers at {url} ({problem}). Expected {path} to answer within {timeout_s:.0f} s: check the "
        f"address (rollout.urls, rollout.urls_file or eval.urls) and that the server is up (GET {url}/health)."
    )
