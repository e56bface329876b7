"""Servers that share devices with the trainer: asleep while it works, awake while they generate.

A server asleep has given its memory for weights, KV cache and CUDA graphs back to the device (SGLang's memory saver; on
a CPU nothing is given back, and all else is the same). Its weights do not survive the sleep: each awakening is followed
by a publish. The caller waits until a server is idle, and for its answers, at most ``timeout_s`` each.
"""

from collections.abc import Sequence

from megatron_rl.weights.bucket_plan import ServerAddress
from megatron_rl.weights.server_calls import ServerCalls

WEIGHTS = ("weights", "cuda_graph")
"""What a server needs to take new weights."""
KV_CACHE = ("kv_cache",)


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
            calls.wait_until_idle("its sleep")
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
