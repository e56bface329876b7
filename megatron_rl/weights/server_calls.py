"""HTTP calls to several SGLang servers at once, each with a deadline and an error that names who waited for whom."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import requests

from megatron_rl.errors import UserError
from megatron_rl.weights.plan import ServerAddress

CONNECT_TIMEOUT_S = 10.0
_REPORT_GRACE_S = 1.0
"""After a first failure the other waits get this long to report theirs: together they tell which side is at fault."""

_SILENCE_REMEDIES = {
    "/begin_weight_update": "a server finishes its running requests first: let generation end, abort it, or publish "
    "with pause=True; if it runs none, it hangs: restart it",
    "/init_weights_update_group": "the server must reach the trainer's master address and port, both sides need a "
    "network interface they share (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), and its tp_size must be the one stated",
}
"""What to try when a server does not answer in time."""
_REFUSAL_REMEDIES = {
    "/update_weights_from_disk": "trainer and servers must see the folder under the same path",
}
"""What to try when a server answers with an error."""
_DEFAULT_REMEDY = "look into the server's log, restart it if it hangs or died, and publish again"


class ServerCallError(UserError, RuntimeError):
    """A server was not reached, did not answer in time or refused."""


@dataclass(frozen=True)
class Reply:
    ok: bool
    body: dict[str, Any]


class ServerCalls:
    """One kept-alive connection and one thread a server, and one more thread for the trainer's own part.

    Lives for one publish: a call that was given up at its deadline still occupies its connection, and servers close
    idle connections after a few seconds anyhow.
    """

    def __init__(self, servers: Sequence[ServerAddress], timeout_s: float):
        self.servers = tuple(servers)
        self.timeout_s = timeout_s
        self._sessions = [requests.Session() for _ in self.servers]
        for session in self._sessions:
            session.trust_env = False  # no HTTP proxy between trainer and servers
        self._threads = ThreadPoolExecutor(len(self.servers) + 1, thread_name_prefix="weight-sync")

    def __enter__(self) -> "ServerCalls":
        return self

    def __exit__(self, *exc_info: object) -> None:
        # Without waiting: threads of abandoned calls end at their own deadlines.
        self._threads.shutdown(wait=False, cancel_futures=True)
        for session in self._sessions:
            session.close()

    def run(self, function: Callable[..., Any], *args: Any) -> Future:
        return self._threads.submit(function, *args)

    def submit(self, path: str, bodies: Sequence[dict], allow_refusal: bool = False) -> list[Future]:
        """POST ``bodies[i]`` to server i; the futures give Reply or raise ServerCallError."""
        return [
            self._threads.submit(self._call, "POST", server.url, session, path, body, allow_refusal)
            for server, session, body in zip(self.servers, self._sessions, bodies, strict=True)
        ]

    def post_each(self, path: str, bodies: Sequence[dict], allow_refusal: bool = False) -> list[Reply]:
        return wait_for_all(self.submit(path, bodies, allow_refusal), self.timeout_s, f"answers to POST {path}")

    def post(self, path: str, body: dict | None = None, allow_refusal: bool = False) -> list[Reply]:
        return self.post_each(path, [body or {}] * len(self.servers), allow_refusal)

    def get(self, path: str) -> list[dict[str, Any]]:
        futures = [
            self._threads.submit(self._call, "GET", server.url, session, path, None, False)
            for server, session in zip(self.servers, self._sessions)
        ]
        return [reply.body for reply in wait_for_all(futures, self.timeout_s, f"answers to GET {path}")]

    def _call(
        self, method: str, url: str, session: requests.Session, path: str, body: dict | None, allow_refusal: bool
    ) -> Reply:
        try:
            response = session.request(method, url + path, json=body, timeout=(CONNECT_TIMEOUT_S, self.timeout_s))
        except requests.exceptions.ReadTimeout as error:
            remedy = _SILENCE_REMEDIES.get(path, _DEFAULT_REMEDY)
            raise ServerCallError(
                f"the trainer waited {self.timeout_s:g} s for {url} to answer {method} {path}; {remedy}"
            ) from error
        except requests.exceptions.RequestException as error:
            raise ServerCallError(
                f"{url} is unreachable or died during {method} {path} ({type(error).__name__}); {_DEFAULT_REMEDY}"
            ) from error
        try:
            content = response.json()
        except ValueError:
            content = {}
        if not isinstance(content, dict):
            content = {}
        if not response.ok and not allow_refusal:
            said = content.get("message") or response.text[:500]
            remedy = _REFUSAL_REMEDIES.get(path, _DEFAULT_REMEDY)
            raise ServerCallError(f"{url} answered {method} {path} with {response.status_code}: {said}; {remedy}")
        return Reply(response.ok, content)


def wait_for_all(futures: Sequence[Future], timeout_s: float, what: str) -> list[Any]:
    """Results of all ``futures``; the first failure ends the wait and is raised together with the others' reports.

    Every future has a deadline of its own; ``timeout_s`` (plus a grace) is the net under them.
    """
    done, pending = wait(futures, timeout=timeout_s + CONNECT_TIMEOUT_S, return_when=FIRST_EXCEPTION)
    if pending and any(future.exception() for future in done):
        _, pending = wait(pending, timeout=_REPORT_GRACE_S)
    errors = [future.exception() for future in futures if future.done() and future.exception()]
    if errors:
        messages = dict.fromkeys(str(error) for error in errors)
        raise ServerCallError("; ".join(messages)) from errors[0]
    if pending:
        raise ServerCallError(f"the trainer waited {timeout_s:g} s for {what}; {_DEFAULT_REMEDY}")
    return [future.result() for future in futures]
