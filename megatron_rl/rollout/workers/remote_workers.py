"""Starts rollout workers on the nodes other than the driver's.

When the driver calls for it (collective), the first rank of each such node starts as many workers as run on the
driver's machine, and a server for the arrays that stay on the node (``parallel/array_server.py``). The rank keeps
the workers' shared files and listening sockets open, so that a worker that crashes is restarted at the same address
and its stored arrays survive; all of them end with the rank. Which process waits for which: the driver waits for
these ranks, at most ``parallel.collective_timeout_s``.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.parallel import collectives
from megatron_rl.parallel.array_server import ArrayServerAddress, start_array_server
from megatron_rl.rollout.workers.remote_calls import RemoteWorkerInfo
from megatron_rl.rollout.workers.worker_pool import start_worker
from megatron_rl.system.files.shared_file import NODE, SharedArrays, empty_file, new_file
from megatron_rl.system.processes.child_process import new_secret
from megatron_rl.training.array_transport import ArrayTransport, MapProbe, can_map, new_probe
from megatron_rl.training.trainer_rank import Call, TrainerRank

_MAX_CRASHES = 5
_STABLE_S = 600.0
"""After this many seconds without a crash, a worker's crash does not count as consecutive."""
_PAUSE_S = 0.5
_CONNECT_TIMEOUT_S = 20.0
_MAX_CONNECTING = 64


@dataclass(frozen=True)
class _StartedWorkers:
    """The workers and the array server that the first rank of a node has started."""

    host: str
    listeners: Sequence[tuple[int, int]]
    """(port, descriptor of the shared file) of each worker."""
    secret: str
    pid: int
    service: ArrayServerAddress
    probe: MapProbe
    """Finds out which ranks can map arrays of that node."""


def _report_start(rank: TrainerRank, *, num_workers: int, near: Sequence[int]) -> list[Any]:
    """Start workers on the first rank of each node except those in ``near``, the ranks on the driver's machine. Collective.

    Returns, by rank, the started workers, the text of an error, or None for a rank that starts none.
    """
    started: _StartedWorkers | str | None = None
    if rank.topology.rank not in near and os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            started = _started(num_workers)
        except (OSError, UserError) as error:
            started = f"{type(error).__name__}: {error}"
    return collectives.gather_objects(started, what="where its rollout workers listen")


def _report_mapped(rank: TrainerRank, *, probes: Sequence[MapProbe]) -> list[int]:
    """Return, by rank, the index of the first node whose files the rank can map, or -1. Collective."""
    mapped = next((index for index, probe in enumerate(probes) if can_map(probe)), -1)
    return collectives.gather_objects(mapped, what="which node's files it can map")


def start_on_nodes(
    transport: ArrayTransport, num_workers: int, note: Callable[[str], None], warn: Callable[[str], None]
) -> list[RemoteWorkerInfo]:
    """Start ``num_workers`` on each node except the driver's (main thread, collective); returns all started workers."""
    if not num_workers or not transport.has_far:
        return []
    started = transport.call(Call("to start rollout workers", partial(_report_start, num_workers=num_workers, near=transport.near)))
    # In parallel, because each node that cannot be reached takes the whole timeout.
    with ThreadPoolExecutor(_MAX_CONNECTING) as pool:
        problems = list(pool.map(_problem, started))
    nodes: list[_StartedWorkers] = []
    for rank, (reported, problem) in enumerate(zip(started, problems, strict=True)):
        if problem:
            warn(
                f"no rollout worker on the node of rank {rank}: {problem}. Its share of the calls to the servers is made on the "
                "driver's machine. Workers listen at the node's address towards MASTER_ADDR, at ports that the system chooses"
            )
        elif isinstance(reported, _StartedWorkers):
            nodes.append(reported)
    probes = partial(_report_mapped, probes=[node.probe for node in nodes])
    mapped = transport.call(Call("what it may be able to map", probes)) if nodes else []
    workers: list[RemoteWorkerInfo] = []
    for index, on_node in enumerate(nodes):
        node = transport.add_node(on_node.service, [rank for rank, of_rank in enumerate(mapped) if of_rank == index])
        pid = node * NODE + on_node.pid
        workers += [RemoteWorkerInfo(on_node.host, port, on_node.secret, pid, fd) for port, fd in on_node.listeners]
    if workers:
        hosts = sorted({worker.host for worker in workers})
        note(f"rollout workers on other nodes: {num_workers} each at {', '.join(hosts)}; routes stay on the node that reads them")
    return workers


def _problem(started: "_StartedWorkers | str | None") -> str:
    """Reason why a rank's workers cannot be used, or an empty string."""
    if not isinstance(started, _StartedWorkers):
        return started or ""
    for port, _ in started.listeners:
        try:
            socket.create_connection((started.host, port), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError as error:
            return f"{started.host}:{port} cannot be reached: {error}"
    return ""


def _started(num_workers: int) -> _StartedWorkers:
    """Start workers, or reuse this process's workers with empty files: a run that rolls back opens its servers again."""
    if _STARTED and len(_STARTED[0].listeners) == num_workers:
        for _, file_fd in _STARTED[0].listeners:
            empty_file(file_fd)
    else:
        _STARTED[:] = [_start(num_workers)]
    return _STARTED[0]


_STARTED: list[_StartedWorkers] = []


def _start(num_workers: int) -> _StartedWorkers:
    host, secret = _own_address(), new_secret()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listeners = []
    for _ in range(num_workers):
        listener = socket.create_server((host, 0), family=family)
        file_fd = new_file("megatron_rl_rollout")
        threading.Thread(target=_keep_alive, args=(listener, file_fd, secret), daemon=True).start()
        listeners.append((listener.getsockname()[1], file_fd))
    shared = SharedArrays()
    probe, array = new_probe(shared)
    _KEPT.extend((shared, array))  # the address of the probe is valid only while this process refers to the array
    return _StartedWorkers(host, listeners, secret.hex(), os.getpid(), start_array_server(host), probe)


_KEPT: list[Any] = []
"""Arrays that other processes of this node map until this process exits."""


def _own_address() -> str:
    """The address of this node that its traffic to MASTER_ADDR leaves from."""
    to = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    family, kind, protocol, _, target = socket.getaddrinfo(*to, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:  # nothing is sent
        probe.connect(target)
        return str(probe.getsockname()[0])


def _keep_alive(listener: socket.socket, file_fd: int, secret: bytes) -> None:
    """Run one worker at a time. After the last crash the listener is closed, so that new connections are refused."""
    num_crashes = 0
    while num_crashes < _MAX_CRASHES:
        started_s = time.monotonic()
        process = start_worker("listen", listener.fileno(), file_fd, secret)
        status = process.wait()
        num_crashes = 1 if time.monotonic() - started_s > _STABLE_S else num_crashes + 1
        restarts = "it is restarted" if num_crashes < _MAX_CRASHES else f"it crashed {num_crashes} times and is not restarted"
        print(f"a rollout worker of this node (process {process.pid}) ended with status {status}; {restarts}", file=sys.stderr)
        time.sleep(_PAUSE_S)
    listener.close()
