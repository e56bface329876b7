"""Rollout workers on the nodes that the driver is not on.

The first rank of each such node starts as many as run on the driver's machine, and a server for the arrays that stay there
(``parallel/array_server.py``), when the driver calls for it (collective). It keeps their files and the sockets that
they listen at, so that one that dies is started again where it was, and what it had stored is not lost; all of it ends with the
rank. Who waits for whom: the driver for these ranks, at most ``parallel.collective_timeout_s``.
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

import numpy as np

from megatron_rl.errors import UserError
from megatron_rl.parallel import collectives
from megatron_rl.parallel.array_server import ArrayServerAddress, start_array_server
from megatron_rl.rollout.workers.remote_calls import RemoteWorkerInfo
from megatron_rl.rollout.workers.worker_pool import start_worker
from megatron_rl.system.files.shared_file import NODE, SharedArrays, address_of, empty_file, new_file
from megatron_rl.system.processes.child_process import new_secret
from megatron_rl.training.array_transport import ArrayTransport, MapProbe
from megatron_rl.training.trainer_rank import Call, TrainerRank

_MAX_DEATHS = 5
_GOOD_LIFE_S = 600.0
"""After this many seconds of life, an exit has another cause than the previous one."""
_PAUSE_S = 0.5
_CONNECT_TIMEOUT_S = 20.0
_MAX_CONNECTING = 64


@dataclass(frozen=True)
class _StartedWorkers:
    """The processes and files that the first rank of a node has started."""

    host: str
    listeners: Sequence[tuple[int, int]]
    """(port, number of the shared file's descriptor) of each worker."""
    secret: str
    pid: int
    service: ArrayServerAddress
    probe: MapProbe
    """An array that ranks of that node can map."""


def _report_start(rank: TrainerRank, *, num_workers: int, near: Sequence[int]) -> list[Any]:
    """Start workers on the first rank of each node, and tell the driver. ``near``: ranks on the driver's machine. Collective.

    The driver gets, by rank, what was started, an error text, or None.
    """
    found: _StartedWorkers | str | None = None
    if rank.topology.rank not in near and os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            found = _started(num_workers)
        except (OSError, UserError) as error:
            found = f"{type(error).__name__}: {error}"
    return collectives.gather_objects(found, what="where its rollout workers listen")


def _report_mapped(rank: TrainerRank, *, probes: Sequence[MapProbe]) -> list[int]:
    """Tell the driver the first of the nodes whose files this rank can map; -1: none. Collective."""
    found = next((index for index, probe in enumerate(probes) if probe.succeeds()), -1)
    return collectives.gather_objects(found, what="which node's files it can map")


def start_on_nodes(
    transport: ArrayTransport, num_workers: int, note: Callable[[str], None], warn: Callable[[str], None]
) -> list[RemoteWorkerInfo]:
    """``num_workers`` on each node but the driver's (main thread, collective); none where all ranks are on its machine."""
    if not num_workers or not transport.has_far:
        return []
    started = transport.call(Call("to start rollout workers", partial(_report_start, num_workers=num_workers, near=transport.near)))
    with ThreadPoolExecutor(_MAX_CONNECTING) as pool:
        problems = list(pool.map(_problem, started))
    nodes: list[_StartedWorkers] = []
    for rank, (found, problem) in enumerate(zip(started, problems, strict=True)):
        if problem:
            warn(
                f"no rollout worker on the node of rank {rank}: {problem}. Its share of the calls to the servers is made on the "
                "driver's machine; workers listen at the address that MASTER_ADDR is reached from, at ports that the system chooses"
            )
        elif found is not None:
            nodes.append(found)
    probes = partial(_report_mapped, probes=[node.probe for node in nodes])
    seen = transport.call(Call("what it may be able to map", probes)) if nodes else []
    workers: list[RemoteWorkerInfo] = []
    for index, found in enumerate(nodes):
        node = transport.add_node(found.service, [rank for rank, sees in enumerate(seen) if sees == index])
        workers += [RemoteWorkerInfo(found.host, port, found.secret, node * NODE + found.pid, fd) for port, fd in found.listeners]
    if workers:
        hosts = sorted({worker.host for worker in workers})
        note(f"rollout workers on further nodes: {num_workers} each at {', '.join(hosts)}; routes stay where they are read")
    return workers


def _problem(found: "_StartedWorkers | str | None") -> str:
    """Why a node does without workers; empty where it does not, or where its rank is no node's first."""
    if not isinstance(found, _StartedWorkers):
        return found or ""
    for port, _ in found.listeners:
        try:
            socket.create_connection((found.host, port), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError as error:
            return f"{found.host}:{port} cannot be reached: {error}"
    return ""


def _started(num_workers: int) -> _StartedWorkers:
    """Once: a run that goes back to a checkpoint opens its rollout side again, and finds the workers with empty files."""
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
    content, shared = os.urandom(64), SharedArrays()
    array = shared.put(np.frombuffer(content, np.uint8))
    _KEPT.extend((shared, array))
    address = address_of(array)
    assert address is not None  # it was put there
    return _StartedWorkers(host, listeners, secret.hex(), os.getpid(), start_array_server(host), MapProbe(address, content))


_KEPT: list[Any] = []
"""Arrays that other processes of this node map, for as long as this one lives."""


def _own_address() -> str:
    """The address of this node from which the ranks' traffic leaves."""
    to = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    family, kind, protocol, _, target = socket.getaddrinfo(*to, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as looked_at:  # nothing is sent
        looked_at.connect(target)
        return str(looked_at.getsockname()[0])


def _keep_alive(listener: socket.socket, file_fd: int, secret: bytes) -> None:
    """One worker after the other. The last one's listener is closed: who connects hears of it."""
    num_deaths = 0
    while num_deaths < _MAX_DEATHS:
        began_s = time.monotonic()
        process = start_worker("listen", listener.fileno(), file_fd, secret)
        status = process.wait()
        num_deaths = 1 if time.monotonic() - began_s > _GOOD_LIFE_S else num_deaths + 1
        again = "it is started again" if num_deaths < _MAX_DEATHS else f"it died {num_deaths} times, and is not started again"
        print(f"a rollout worker of this node (process {process.pid}) ended with status {status}; {again}", file=sys.stderr)
        time.sleep(_PAUSE_S)
    listener.close()
