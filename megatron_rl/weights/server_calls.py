"""Concurrent HTTP calls to several SGLang servers, each with a deadline and an error that names the waiting process.

A server gets one call at a time: later calls wait for its reply, in order. After a failed bucket a server gets no
other bucket, because it would wait for bytes that are never sent.
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
"""Time for other calls to fail after a first failure; together, their errors show which side caused the failure."""
_POLL_S = 0.02

_SILENCE_REMEDIES = {
    "/begin_weight_update": "a server finishes its running requests first: let generation end or abort it; if it runs "
    "none, it hangs: restart it",
    "/init_weights_update_group": "the server must reach the trainer's master address and port, both sides need a "
    "network interface they share (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), and its tp_size must be the one stated; on GPUs "
    "NCCL_CUMEM_ENABLE and NCCL_NVLS_ENABLE must be the same on both",
}
"""Remedies, by path, for a server that does not reply in time."""
_REFUSAL_REMEDIES = {
    "/update_weights_from_disk": "trainer and servers must see the folder under the same path",
    "/load_lora_adapter_from_tensors": "start attached servers by `megatron-rl serve --config` with this recipe, or set "
    "policy.lora.sync=merged",
}
"""Remedies, by path, for a server that replies with an error."""
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
    "/load_lora_adapter_from_tensors": {"loaded_adapters": dict},
}
"""Required fields of a successful reply, by path; without this check a gateway's page would count as success."""
_BUCKETS = frozenset(("/update_weights_from_distributed", "/update_weights_from_tensor"))
_TEXT_PATHS = frozenset(("/flush_cache",))
_MAX_REPLY_BYTES = 1 << 28
_DEFAULT_REMEDY = "check the server's log, restart it if it hangs or has exited, and publish again"


class ServerCallError(UserError, RuntimeError):
    """A server that was unreachable, did not reply in time, or refused a request."""


class ServerCalls:
    """HTTP calls over one connection per server; ``run`` executes the trainer's part of a transfer in a thread meanwhile.

    An instance lives for one publish, because servers close idle connections after a few seconds. Closing it also
    ends calls that timed out.
    """

    def __init__(self, servers: Sequence[ServerAddress], timeout_s: float, *, pauses: bool = False) -> None:
        """``pauses=False`` makes ``pause`` do nothing; loading weights then waits until no request is running."""
        self.servers = tuple(servers)
        self.timeout_s = timeout_s
        self._pauses = pauses
        self.paused = False
        """True while the servers are paused, that is, until ``go_on``."""
        self._http = HttpThread(HttpSession(connect_timeout_s=_CONNECT_TIMEOUT_S, max_answer_bytes=_MAX_REPLY_BYTES))
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="weight-sync")
        self._turns = {server.url: asyncio.Lock() for server in self.servers}
        self._lost: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        # Without waiting, because an abandoned broadcast ends at its own deadline.
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def run(self, function: Callable[..., Any], *args: Any) -> Future:
        """Run the trainer's part of a transfer, such as a broadcast, in a thread."""
        return self._threads.submit(function, *args)

    def submit(self, path: str, bodies: Sequence[dict[str, Any] | None]) -> list[Future]:
        """POST ``bodies[i]`` (None: no body) to server i; each future returns the reply's body or raises ServerCallError."""
        return self._submit("POST", path, bodies)

    def post(self, path: str, body: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """POST ``body`` to all servers; returns the replies' bodies, one per server. Raises ServerCallError."""
        return wait_for_all(self.submit(path, self._same(body or {})), self.timeout_s, f"replies to POST {path}")

    def accepts(self, path: str, bodies: Sequence[dict[str, Any] | None] | None = None) -> list[bool]:
        """POST a request that a server may refuse; returns one flag per server. Raises ServerCallError without a reply."""
        futures = self._submit("POST", path, bodies or self._same({}), may_refuse=True)
        return [body is not None for body in wait_for_all(futures, self.timeout_s, f"replies to POST {path}")]

    def get(self, path: str) -> list[dict[str, Any]]:
        """GET ``path`` from all servers; returns the replies' bodies, one per server. Raises ServerCallError."""
        return wait_for_all(self._submit("GET", path, self._same(None)), self.timeout_s, f"replies to GET {path}")

    def pause(self) -> None:
        """Pause the servers before weights change, if configured and not paused yet.

        Running requests are retracted from the batch and lose their KV cache, which must not mix weight versions.
        """
        if self._pauses and not self.paused:
            self.paused = True
            self.post("/pause_generation", {"mode": "retract"})

    def go_on(self) -> None:
        """Resume the servers after ``pause``; every request continues from its last token."""
        self.post("/continue_generation")
        self.paused = False

    def wait_until_idle(self, before: str) -> None:
        """Wait until no server has a request other than paused ones. Raises ServerCallError after ``timeout_s``.

        A server replies to a request before it has cleaned up; until then it can neither sleep nor flush its cache.
        ``before``: the action after the wait, for the error message.
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
                    "another client sends requests, or a request hangs: check the server's log"
                )
            time.sleep(_POLL_S)

    def _same(self, body: dict[str, Any] | None) -> list[dict[str, Any] | None]:
        return [body] * len(self.servers)

    def _submit(
        self, method: str, path: str, bodies: Sequence[dict[str, Any] | None], *, may_refuse: bool = False
    ) -> list[Future]:
        coroutines, body, data = [], None, None
        for server, own in zip(self.servers, bodies, strict=True):
            if own is not body:  # usually all servers get the same body, which is then encoded once
                body, data = own, json.dumps(own).encode()
            coroutines.append(self._in_turn(method, server, path, data, may_refuse))
        return self._http.submit_all(coroutines)

    async def _in_turn(
        self, method: str, server: ServerAddress, path: str, body: bytes | None, may_refuse: bool
    ) -> dict[str, Any] | None:
        async with self._turns[server.url]:
            if path in _BUCKETS and server.url in self._lost:
                raise ServerCallError(f"{server.url} got no further request for {path} after its failure")
            try:
                return await self._call(method, server, path, body, may_refuse)
            except ServerCallError:
                if path in _BUCKETS:
                    self._lost.add(server.url)
                raise

    async def _call(
        self, method: str, server: ServerAddress, path: str, body: bytes | None, may_refuse: bool
    ) -> dict[str, Any] | None:
        """The reply's body ({} if it is not a JSON object), or None if the server refused and ``may_refuse``."""
        url, headers = server.url, bearer(server.api_key)
        try:
            reply = await self._http.session.request(method, url + path, body, timeout_s=self.timeout_s, headers=headers)
        except HttpError as error:
            if isinstance(error, NoHttpReply) and error.timed_out:
                remedy = _SILENCE_REMEDIES.get(path, _DEFAULT_REMEDY)
                raise ServerCallError(
                    f"the trainer waited {self.timeout_s:g} s for {url} to reply to {method} {path}; {remedy}"
                ) from error
            raise ServerCallError(
                f"{url} is unreachable or exited during {method} {path} ({error}); {_DEFAULT_REMEDY}"
            ) from error
        is_json, content = _parse(reply)
        is_json = is_json or path in _TEXT_PATHS
        if reply.status == 200 and content.get("success", True) is True:
            missing = [name for name, kind in _FIELDS.get(path, {}).items() if not isinstance(content.get(name), kind)]
            if missing or not is_json:
                raise ServerCallError(
                    f"{url} replied to {method} {path} without {' and '.join(missing) or 'JSON'}, but with "
                    f"{reply.text[:200]!r}; is it an SGLang server, of a version that requirements/ lists?"
                )
            return content
        if reply.status in (401, 403):
            remedy = "set rollout.api_key_env to the environment variable that has the server's API key"
            raise ServerCallError(f"{url} replied to {method} {path} with {reply.status}: it refuses the key; {remedy}")
        # Only these statuses: a gateway's error or a redirect is not a refusal by the server.
        if may_refuse and reply.status in (200, 400, 404):
            return None
        reason = content.get("message") or reply.text[:500]
        remedy = _REFUSAL_REMEDIES.get(path, _DEFAULT_REMEDY)
        raise ServerCallError(f"{url} replied to {method} {path} with {reply.status}: {reason}; {remedy}")


def _parse(reply: HttpReply) -> tuple[bool, dict[str, Any]]:
    """(True if the reply is JSON, its content); {} if the content is not an object, because some replies are null."""
    try:
        content = reply.json()
    except (ValueError, RecursionError):
        return False, {}
    return True, content if isinstance(content, dict) else {}


def wait_for_all(futures: Sequence[Future], timeout_s: float, what: str) -> list[Any]:
    """Results of all ``futures``. The first failure ends the wait and is raised together with the other failures.

    Every future has its own deadline; ``timeout_s`` (plus a grace period) is a second limit. ``what``: the awaited
    event, for the error message.
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
