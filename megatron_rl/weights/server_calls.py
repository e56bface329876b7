"""HTTP calls to several SGLang servers at once, each with a deadline and an error that names who waited for whom.

A server is called once at a time: further calls wait until it has answered, in the order in which they were asked for. After a
bucket that failed it gets no other one: it would wait for bytes that do not come.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, Self

from megatron_rl.errors import UserError
from megatron_rl.system.http.json_http import HttpError, HttpReply, HttpSession, HttpThread, NoHttpReply, bearer
from megatron_rl.weights.bucket_plan import ServerAddress

_CONNECT_TIMEOUT_S = 10.0
_REPORT_GRACE_S = 1.0
"""After a first failure the other waits get this long to report theirs: together they tell which side is at fault."""
_POLL_S = 0.02

_SILENCE_REMEDIES = {
    "/begin_weight_update": "a server finishes its running requests first: let generation end or abort it; if it runs "
    "none, it hangs: restart it",
    "/init_weights_update_group": "the server must reach the trainer's master address and port, both sides need a "
    "network interface they share (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), and its tp_size must be the one stated; on GPUs "
    "NCCL_CUMEM_ENABLE and NCCL_NVLS_ENABLE must be the same on both",
}
"""What to try when a server does not answer in time."""
_REFUSAL_REMEDIES = {
    "/update_weights_from_disk": "trainer and servers must see the folder under the same path",
}
"""What to try when a server answers with an error."""
_FIELDS: dict[str, dict[str, type]] = {
    "/init_weights_update_group": {"success": bool},
    "/begin_weight_update": {"success": bool},
    "/update_weights_from_distributed": {"success": bool},
    "/update_weights_from_tensor": {"success": bool},
    "/update_weights_from_disk": {"success": bool},
    "/end_weight_update": {"success": bool},
    "/model_info": {"weight_version": str},
    "/server_info": {"device": str, "dtype": str},
    "/weights_checker": {"ranks": list},
}
"""What a good answer holds. A page of a gateway has none of it, and would pass for weights that arrived."""
_BUCKETS = frozenset(("/update_weights_from_distributed", "/update_weights_from_tensor"))
_TEXT_PATHS = frozenset(("/flush_cache",))
_MAX_ANSWER_BYTES = 1 << 28
_DEFAULT_REMEDY = "look into the server's log, restart it if it hangs or died, and publish again"


class ServerCallError(UserError, RuntimeError):
    """A server was not reached, did not answer in time or refused."""


class ServerCalls:
    """One kept-alive connection per server, and one thread for the trainer's own part.

    Lives for one publish: servers close idle connections after a few seconds anyhow. Calls given up at a deadline end
    with it.
    """

    def __init__(self, servers: Sequence[ServerAddress], timeout_s: float, *, pauses: bool = False) -> None:
        """``pauses``: ``pause`` does so; without it, loading weights waits until no request is left."""
        self.servers = tuple(servers)
        self.timeout_s = timeout_s
        self._pauses = pauses
        self.paused = False
        """The servers generate nothing until ``go_on``."""
        self._http = HttpThread(HttpSession(connect_timeout_s=_CONNECT_TIMEOUT_S, max_answer_bytes=_MAX_ANSWER_BYTES))
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="weight-sync")
        self._turns = {server.url: asyncio.Lock() for server in self.servers}
        self._lost: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        # Without waiting: a broadcast that was abandoned ends at its own deadline.
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def run(self, function: Callable[..., Any], *args: Any) -> Future:
        """Have the trainer's own part done in a thread."""
        return self._threads.submit(function, *args)

    def submit(self, path: str, bodies: Sequence[dict[str, Any] | None]) -> list[Future]:
        """POST ``bodies[i]`` to server i; the futures give the answer's body or raise ServerCallError."""
        return self._submit("POST", path, bodies)

    def post(self, path: str, body: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """The answers' bodies, one per server; raises ServerCallError."""
        return wait_for_all(self.submit(path, self._same(body or {})), self.timeout_s, f"answers to POST {path}")

    def accepts(self, path: str, bodies: Sequence[dict[str, Any] | None] | None = None) -> list[bool]:
        """POST where a server may refuse: whether each took it. Raises ServerCallError for one that does not answer."""
        futures = self._submit("POST", path, bodies or self._same({}), may_refuse=True)
        return [body is not None for body in wait_for_all(futures, self.timeout_s, f"answers to POST {path}")]

    def get(self, path: str) -> list[dict[str, Any]]:
        """The answers' bodies, one per server; raises ServerCallError."""
        return wait_for_all(self._submit("GET", path, self._same(None)), self.timeout_s, f"answers to GET {path}")

    def pause(self) -> None:
        """Before weights change: running requests leave the batch, and lose what their prefixes were computed to; once."""
        if self._pauses and not self.paused:
            self.paused = True
            self.post("/pause_generation", {"mode": "retract"})

    def go_on(self) -> None:
        """After ``pause``: every request goes on from its last token."""
        self.post("/continue_generation")
        self.paused = False

    def wait_until_idle(self, before: str) -> None:
        """Wait until no server has a request, but for paused ones; raises ServerCallError after ``timeout_s``.

        A server answers a request before it has put it away, and until then it neither sleeps nor flushes its cache.
        ``before`` says what the wait is for.
        """
        self.pause()
        deadline_s = time.monotonic() + self.timeout_s
        while busy := [
            server.url
            for server, idle in zip(self.servers, self.accepts("/flush_cache"), strict=True)
            if not idle
        ]:
            if time.monotonic() > deadline_s:
                raise ServerCallError(
                    f"the trainer waited {self.timeout_s:g} s for {', '.join(busy)} to become idle before {before}; "
                    "somebody else sends requests there, or a request hangs: look into the server's log"
                )
            time.sleep(_POLL_S)

    def _same(self, body: dict[str, Any] | None) -> list[dict[str, Any] | None]:
        return [body] * len(self.servers)

    def _submit(
        self, method: str, path: str, bodies: Sequence[dict[str, Any] | None], *, may_refuse: bool = False
    ) -> list[Future]:
        works, body, data = [], None, None
        for server, own in zip(self.servers, bodies, strict=True):
            if own is not body:  # most often all servers are asked the same
                body, data = own, json.dumps(own).encode()
            works.append(self._in_turn(method, server, path, data, may_refuse))
        return self._http.submit_all(works)

    async def _in_turn(
        self, method: str, server: ServerAddress, path: str, body: bytes | None, may_refuse: bool
    ) -> dict[str, Any] | None:
        async with self._turns[server.url]:
            if path in _BUCKETS and server.url in self._lost:
                raise ServerCallError(f"{server.url} was not asked for {path} any more")
            try:
                return await self._call(method, server, path, body, may_refuse)
            except ServerCallError:
                if path in _BUCKETS:
                    self._lost.add(server.url)
                raise

    async def _call(
        self, method: str, server: ServerAddress, path: str, body: bytes | None, may_refuse: bool
    ) -> dict[str, Any] | None:
        """The answer's body ({} where it is no JSON object); None where the server refused and may."""
        url, headers = server.url, bearer(server.api_key)
        try:
            answer = await self._http.session.request(method, url + path, body, timeout_s=self.timeout_s, headers=headers)
        except HttpError as error:
            if isinstance(error, NoHttpReply) and error.timed_out:
                remedy = _SILENCE_REMEDIES.get(path, _DEFAULT_REMEDY)
                raise ServerCallError(
                    f"the trainer waited {self.timeout_s:g} s for {url} to answer {method} {path}; {remedy}"
                ) from error
            raise ServerCallError(
                f"{url} is unreachable or died during {method} {path} ({error}); {_DEFAULT_REMEDY}"
            ) from error
        is_json, content = _read(answer)
        is_json = is_json or path in _TEXT_PATHS
        if answer.status == 200 and content.get("success", True) is True:
            missing = [name for name, kind in _FIELDS.get(path, {}).items() if not isinstance(content.get(name), kind)]
            if missing or not is_json:
                raise ServerCallError(
                    f"{url} answered {method} {path} without {' and '.join(missing) or 'JSON'}, but with "
                    f"{answer.text[:200]!r}; is it an SGLang server, of a version that requirements/ names?"
                )
            return content
        if answer.status in (401, 403):
            remedy = "set rollout.api_key_env to the environment variable that holds the server's API key"
            raise ServerCallError(f"{url} answered {method} {path} with {answer.status}: it refuses the key; {remedy}")
        # A gateway's fault, or a redirect, is no refusal of the server's.
        if may_refuse and answer.status in (200, 400, 404):
            return None
        said = content.get("message") or answer.text[:500]
        remedy = _REFUSAL_REMEDIES.get(path, _DEFAULT_REMEDY)
        raise ServerCallError(f"{url} answered {method} {path} with {answer.status}: {said}; {remedy}")


def _read(answer: HttpReply) -> tuple[bool, dict[str, Any]]:
    """Whether it is JSON; {} where it is no object: some answers are null."""
    try:
        content = answer.json()
    except (ValueError, RecursionError):
        return False, {}
    return True, content if isinstance(content, dict) else {}


def wait_for_all(futures: Sequence[Future], timeout_s: float, what: str) -> list[Any]:
    """Results of all ``futures``; the first failure ends the wait and is raised together with the others' reports.

    Every future has a deadline of its own; ``timeout_s`` (plus a grace) is the net under them.
    """
    done, pending = wait(futures, timeout=timeout_s + _CONNECT_TIMEOUT_S, return_when=FIRST_EXCEPTION)
    if pending and any(future.exception() for future in done):
        _, pending = wait(pending, timeout=_REPORT_GRACE_S)
    errors = [future.exception() for future in futures if future.done() and future.exception()]
    if errors:
        messages = dict.fromkeys(str(error) for error in errors)
        raise ServerCallError("; ".join(messages)) from errors[0]
    if pending:
        raise ServerCallError(f"the trainer waited {timeout_s:g} s for {what}; {_DEFAULT_REMEDY}")
    return [future.result() for future in futures]
