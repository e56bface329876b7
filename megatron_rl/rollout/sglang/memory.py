"""Servers that share devices with the trainer: asleep while it works, awake while they generate.

A server asleep has given its memory for weights, KV cache and CUDA graphs back to the device (SGLang's memory saver; on
a CPU nothing is given back, and all else is the same). Its weights do not survive the sleep: each awakening is followed
by a publish. The caller waits until a server is idle, and for its answers, at most ``timeout_s`` each.
"""

import time
from collections.abc import Sequence

from megatron_rl.weights.plan import ServerAddress
from megatron_rl.weights.server_calls import ServerCallError, ServerCalls

WEIGHTS = ("weights", "cuda_graph")
"""What a server needs to take new weights."""
KV_CACHE = ("kv_cache",)
_POLL_S = 0.02


class ServerMemory:
    """Which servers are asleep, and the calls that change it; used by one thread."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._released: dict[ServerAddress, set[str]] = {}

    def sleep(self, servers: Sequence[ServerAddress]) -> None:
        """Have every server that is awake give its memory back; raises ServerCallError."""
        awake = [server for server in servers if not self._released.get(server)]
        if not awake:
            return
        with ServerCalls(awake, self._timeout_s) as calls:
            self._wait_until_idle(calls)
            calls.post("/release_memory_occupation", {"tags": [*WEIGHTS, *KV_CACHE]})
        for server in awake:
            # A restarted server is another address: what an older one released is forgotten here.
            self._released = {known: tags for known, tags in self._released.items() if known.url != server.url}
            self._released[server] = {*WEIGHTS, *KV_CACHE}

    def wake(self, servers: Sequence[ServerAddress], tags: Sequence[str]) -> None:
        """Let the servers take the memory of ``tags`` again, where they gave it back; raises ServerCallError."""
        # A server that is asked for memory which it holds already dies.
        asleep = [server for server in servers if self._released.get(server, set()).issuperset(tags)]
        if not asleep:
            return
        with ServerCalls(asleep, self._timeout_s) as calls:
            calls.post("/resume_memory_occupation", {"tags": list(tags)})
        for server in asleep:
            self._released[server].difference_update(tags)

    def _wait_until_idle(self, calls: ServerCalls) -> None:
        """A server answers a request before it has put it away, and one that is told to sleep before dies."""
        deadline_s = time.monotonic() + self._timeout_s
        while busy := [
            server.url
            for server, reply in zip(calls.servers, calls.post("/flush_cache", allow_refusal=True), strict=True)
            if not reply.ok
        ]:
            if time.monotonic() > deadline_s:
                raise ServerCallError(
                    f"the trainer waited {self._timeout_s:g} s for {', '.join(busy)} to become idle before its sleep; "
                    "somebody else sends requests there, or a request hangs: look into the server's log"
                )
            time.sleep(_POLL_S)
