"""Sleep and wake of servers that share devices with the trainer: asleep while it trains, awake while they generate.

A sleeping server has released its memory for weights, KV cache and CUDA graphs to the device (SGLang's memory
saver; on a CPU nothing is released, but the calls are the same). Weights do not survive a sleep, so every wake-up
is followed by a publish. The caller waits at most ``timeout_s`` each for idle servers and for their replies.
"""

from collections.abc import Sequence

from megatron_rl.weights.bucket_plan import ServerAddress
from megatron_rl.weights.server_calls import ServerCalls

WEIGHTS = ("weights", "cuda_graph")
"""Memory that a server needs to load new weights."""
KV_CACHE = ("kv_cache",)


class ServerMemory:
    """Tracks which servers are asleep and sends the calls that change it; used by one thread."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._released: dict[ServerAddress, set[str]] = {}

    def sleep(self, servers: Sequence[ServerAddress]) -> None:
        """Release the memory of every server that is awake; raises ServerCallError."""
        awake = [server for server in servers if not self._released.get(server)]
        if not awake:
            return
        with ServerCalls(awake, self._timeout_s) as calls:
            calls.wait_until_idle("its sleep")
            calls.post("/release_memory_occupation", {"tags": [*WEIGHTS, *KV_CACHE]})
        for server in awake:
            # A restarted server has a new address, so the state of its previous incarnation is dropped here.
            self._released = {known: tags for known, tags in self._released.items() if known.url != server.url}
            self._released[server] = {*WEIGHTS, *KV_CACHE}

    def wake(self, servers: Sequence[ServerAddress], tags: Sequence[str]) -> None:
        """Let the servers allocate the memory of ``tags`` that they released; raises ServerCallError."""
        # A server crashes on a call to resume memory that it has not released.
        asleep = [server for server in servers if self._released.get(server, set()).issuperset(tags)]
        if not asleep:
            return
        with ServerCalls(asleep, self._timeout_s) as calls:
            calls.post("/resume_memory_occupation", {"tags": list(tags)})
        for server in asleep:
            self._released[server].difference_update(tags)
