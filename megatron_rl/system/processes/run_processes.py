"""Lists the processes of a run by rank (``processes.json`` in its folder), and probes them, also on other machines.

The driver writes the file once all ranks have started. ``probe_run`` probes the processes of its own machine directly
(``process_probe.py``). For other machines it writes a request into the folder. The first rank of each machine polls for requests
every ``_POLL_S`` seconds, and writes its reply next to the request.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from megatron_rl.errors import UserError
from megatron_rl.system.files.atomic_files import is_locked, write_atomic
from megatron_rl.system.processes.process_probe import ProcessSnapshot, probe

_FILE, _REQUEST, _REPLIES = "processes.json", "processes.ask", "processes-{}.answer"
_POLL_S = 5.0
_PROBE_TIMEOUT_S = 20.0
_SAME_START_S = 2.0
"""Tolerance of comparing start times of one process, which two clocks round differently."""


@dataclass(frozen=True)
class RankProcess:
    rank: int
    host: str
    pid: int
    started_s: float
    """Start time from the kernel, which distinguishes processes that had the same pid."""


@dataclass(frozen=True)
class ProcessTree:
    """The process of a rank first, then all its descendants, with the parent pid of each."""

    member: RankProcess
    seen: tuple[ProcessSnapshot, ...]
    parents: tuple[int, ...]


def this_process(rank: int) -> RankProcess:
    return RankProcess(rank, socket.gethostname(), os.getpid(), psutil.Process().create_time())


def write_members(folder: Path, members: Sequence[RankProcess]) -> None:
    """Write the file, unless another run has locked the folder, which is reported later. Raises OSError."""
    if is_locked(folder / ".lock"):
        return
    write_atomic(folder / _FILE, json.dumps([asdict(member) for member in members]))


def read_members(folder: Path) -> list[RankProcess]:
    """Read the file. Raises UserError if it is missing or unreadable."""
    path = folder / _FILE
    try:
        return [RankProcess(**member) for member in json.loads(path.read_text())]
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} has no {_FILE}: expected the output folder of a run (run.output_dir) whose ranks have started. For a run "
            "that failed earlier, see the log of its launcher"
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def probe_run(folder: Path, members: Sequence[RankProcess]) -> tuple[list[ProcessTree], list[str]]:
    """Return all processes of ``members``, and the hosts that did not reply. Takes seconds."""
    here = socket.gethostname()
    elsewhere = sorted({member.host for member in members} - {here})
    request = uuid.uuid4().hex if elsewhere else ""
    if request:
        write_atomic(folder / _REQUEST, request)
    trees = _probe_here(members, here)
    deadline_s = time.monotonic() + _PROBE_TIMEOUT_S
    try:
        while elsewhere and time.monotonic() < deadline_s:
            for host in list(elsewhere):
                found = _reply_of(folder, host, request)
                if found is not None:
                    trees += found
                    elsewhere.remove(host)
            time.sleep(0.2 if elsewhere else 0.0)
    finally:
        for path in folder.glob(_REPLIES.format("*")) if request else ():
            path.unlink(missing_ok=True)
        if request:
            (folder / _REQUEST).unlink(missing_ok=True)
    return sorted(trees, key=lambda tree: tree.member.rank), elsewhere


def serve_probes(folder: Path) -> None:
    """Reply to probe requests for this machine's ranks on a separate thread; called by the first rank of each machine."""
    threading.Thread(target=_serve_forever, args=(folder,), name="processes", daemon=True).start()


def _serve_forever(folder: Path) -> None:
    answered = ""
    while True:
        time.sleep(_POLL_S)
        # A request that is missing or still being written is read again at the next poll.
        with suppress(OSError, ValueError, TypeError, UserError):
            request = (folder / _REQUEST).read_text()
            if request == answered:
                continue
            here = socket.gethostname()
            trees = [asdict(tree) for tree in _probe_here(read_members(folder), here)]
            write_atomic(folder / _REPLIES.format(here), json.dumps({"request": request, "trees": trees}))
            answered = request


def _reply_of(folder: Path, host: str, request: str) -> list[ProcessTree] | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        reply = json.loads((folder / _REPLIES.format(host)).read_text())
        if reply["request"] == request:
            return [
                ProcessTree(RankProcess(**tree["member"]), tuple(map(ProcessSnapshot.from_json, tree["seen"])), tuple(tree["parents"]))
                for tree in reply["trees"]
            ]
    return None


def _probe_here(members: Sequence[RankProcess], here: str) -> list[ProcessTree]:
    pids = {member: list(_pids_of(member)) for member in members if member.host == here}
    seen = {one.pid: one for one in probe([pid for tree in pids.values() for pid, _ in tree], here)}
    return [
        ProcessTree(
            member,
            tuple(seen[pid] for pid, _ in tree) or (ProcessSnapshot(member.pid, here, f"trainer rank {member.rank}", state="gone"),),
            tuple(parent for _, parent in tree) or (0,),
        )
        for member, tree in pids.items()
    ]


def _pids_of(member: RankProcess) -> Iterator[tuple[int, int]]:
    """Yield (pid, parent pid) of the rank and all its descendants; nothing if the rank has exited."""
    with suppress(psutil.Error):
        process = psutil.Process(member.pid)
        # The system may have given an exited rank's id to another process.
        if abs(process.create_time() - member.started_s) > _SAME_START_S:
            return
        yield member.pid, process.ppid()
        for child in process.children(recursive=True):
            with suppress(psutil.Error):
                yield child.pid, child.ppid()
