"""Clean-up after a killed SGLang server, protection of its API key, and its sleep while the trainer uses its devices.

A server has a private folder for its temporary files (including the sockets of its processes), which is removed
when the server is stopped. Its shared memory is unlinked as soon as all its processes have opened it, so nothing
remains however the server ends. If server and driver are killed before that, the process that removes the folder removes
the shared memory too.

A sleeping server (one that shares devices with the trainer) has released its memory for weights, KV cache and CUDA graphs
to the device (SGLang's memory saver; on a CPU nothing is released, but the calls are the same). Weights do not survive a
sleep, so every wake-up is followed by a publish. The caller waits at most ``timeout_s`` each for idle servers and for
their replies.
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from megatron_rl.rollout.sglang.process.options import ServerOptions, secret_config
from megatron_rl.system.http.json_http import HttpError, bearer, get_once
from megatron_rl.weights.bucket_plan import ServerAddress
from megatron_rl.weights.server_calls import ServerCalls

SHARED_MEMORY = Path("/dev/shm")
_LOADS = "sglang_loads_"
_STARTED_S = 3600.0
"""Age from which shared memory is no longer being opened by name: longer than any server takes to start."""
_NAMES = "shared_memory"
REMOVE_SHARED_MEMORY = f'rm -f $(cat "$1/{_NAMES}")'
"""Shell command of a server's folder $1: removes the shared memory that ``note_shared_memory`` noted there."""
_MAX_SOCKET_FOLDER = 80
"""Linux limits the path of a socket to 107 characters."""
WEIGHTS = ("weights", "cuda_graph")
"""Memory that a server needs to load new weights."""
KV_CACHE = ("kv_cache",)


def write_secret(options: ServerOptions, folder: Path) -> str:
    """Write the API key into a file that only this user can read, for ``server_command``. Returns its path, or ""
    without a key."""
    if not options.api_key:
        return ""
    path = folder / "config.yaml"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(secret_config(options))
    return str(path)


def temporary_files_in(folder: Path) -> dict[str, str]:
    """Environment variables that put a server's temporary files into ``folder``. Compiled code stays in the shared
    cache."""
    if len(str(folder)) > _MAX_SOCKET_FOLDER:
        return {}
    cache = folder.parent / f"torchinductor_{os.getuid()}"
    return {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(cache))}


def note_shared_memory(pids: Sequence[int], folder: Path) -> None:
    """Append the names of what a starting server's processes make to a file in its folder."""
    with suppress(OSError), open(folder / _NAMES, "a", encoding="utf-8") as file:  # the disk may be full
        file.write("".join(f"{name} " for name in [*(f"{SHARED_MEMORY}/sgl_shm_*_{pid}_*" for pid in pids), *_load_files(pids)]))


def _load_files(pids: Sequence[int]) -> set[str]:
    """Paths of the files, named at random, through which the processes report their load."""
    found: set[str] = set()
    for pid in pids:
        with suppress(psutil.Error):
            found.update(file.path for file in psutil.Process(pid).open_files() if file.path.startswith(f"{SHARED_MEMORY}/{_LOADS}"))
    return found


def unlink_shared_memory(pids: Sequence[int], url: str, options: ServerOptions) -> None:
    """Unlink the message queues and load files of a ready server; its processes keep their open mappings."""
    remove_shared_memory(pids)
    if any("dp" in name and "size" in name for name in options.server_args):
        return  # another process opens them at an unknown time
    try:
        # SGLang's HTTP process opens the files on the first request for them.
        if get_once(f"{url}/v1/loads", timeout_s=10.0, headers=bearer(options.api_key)).status != 200:
            return
    except HttpError:
        return
    for path in _load_files(pids):
        Path(path).unlink(missing_ok=True)


def remove_shared_memory(pids: Sequence[int]) -> None:
    """Remove the named shared memory that the workers of one server made; a running worker keeps its mapping."""
    for pid in pids:
        for path in SHARED_MEMORY.glob(f"sgl_shm_*_{pid}_*"):
            path.unlink(missing_ok=True)


def remove_abandoned_shared_memory() -> None:
    """Remove this user's shared memory of servers that were killed during their start.

    Only old memory, because containers that share /dev/shm may not see each other's processes.
    """
    for path in SHARED_MEMORY.glob("sgl_shm_*"):
        pid = path.name.split("_")[-2]
        with suppress(OSError):
            about = path.stat()
            is_old = time.time() - about.st_mtime > _STARTED_S and about.st_uid == os.getuid()
            if is_old and pid.isdecimal() and not psutil.pid_exists(int(pid)):
                path.unlink()


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
