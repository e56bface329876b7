"""Lists the processes of a run by rank (``processes.json`` in its folder), and probes them, also on other machines.

The driver writes the file once all ranks are there. Who asks looks at the processes of its own machine itself (``process_probe.py``). For
the others it leaves a question in the folder: the first rank of each machine looks for one every ``_POLL_S`` seconds, and leaves
what it sees beside it.
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

_FILE, _QUESTION, _ANSWERS = "processes.json", "processes.ask", "processes-{}.answer"
_POLL_S = 5.0
_PROBE_TIMEOUT_S = 20.0
_SAME_START_S = 2.0
"""Start times of one process, as two clocks' roundings give them."""


@dataclass(frozen=True)
class RankProcess:
    """A trainer rank, and below it what it has started."""

    rank: int
    host: str
    pid: int
    started_s: float
    """Start time by the kernel; another process with the same pid has another one."""


@dataclass(frozen=True)
class ProcessTree:
    """A rank's process first, then all that it has started, with the number of each one's parent."""

    member: RankProcess
    seen: tuple[ProcessSnapshot, ...]
    parents: tuple[int, ...]


def this_process(rank: int) -> RankProcess:
    return RankProcess(rank, socket.gethostname(), os.getpid(), psutil.Process().create_time())


def write_members(folder: Path, members: Sequence[RankProcess]) -> None:
    """Nothing where another run is writing to the folder, which will be said later. Raises OSError."""
    if is_locked(folder / ".lock"):
        return
    write_atomic(folder / _FILE, json.dumps([asdict(member) for member in members]))


def read_members(folder: Path) -> list[RankProcess]:
    """Raises UserError where the folder names none."""
    path = folder / _FILE
    try:
        return [RankProcess(**member) for member in json.loads(path.read_text())]
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} holds no {_FILE}: expected the output folder of a run (run.output_dir) whose ranks have started. Of a run "
            "that has not come so far, the log of its launcher says more"
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def probe_run(folder: Path, members: Sequence[RankProcess]) -> tuple[list[ProcessTree], list[str]]:
    """All processes of ``members``, and the machines that gave no answer. Takes seconds."""
    here = socket.gethostname()
    elsewhere = sorted({member.host for member in members} - {here})
    question = uuid.uuid4().hex if elsewhere else ""
    if question:
        write_atomic(folder / _QUESTION, question)
    trees = _look_here(members, here)
    deadline_s = time.monotonic() + _PROBE_TIMEOUT_S
    try:
        while elsewhere and time.monotonic() < deadline_s:
            for host in list(elsewhere):
                found = _answer_of(folder, host, question)
                if found is not None:
                    trees += found
                    elsewhere.remove(host)
            time.sleep(0.2 if elsewhere else 0.0)
    finally:
        for path in folder.glob(_ANSWERS.format("*")) if question else ():
            path.unlink(missing_ok=True)
        if question:
            (folder / _QUESTION).unlink(missing_ok=True)
    return sorted(trees, key=lambda tree: tree.member.rank), elsewhere


def serve_probes(folder: Path) -> None:
    """From now on, of this machine's ranks, on a thread of its own: for the first rank of a machine."""
    threading.Thread(target=_answer_forever, args=(folder,), name="processes", daemon=True).start()


def _answer_forever(folder: Path) -> None:
    answered = ""
    while True:
        time.sleep(_POLL_S)
        with suppress(OSError, ValueError, TypeError, UserError):
            question = (folder / _QUESTION).read_text()
            if question == answered:
                continue
            here = socket.gethostname()
            trees = [asdict(tree) for tree in _look_here(read_members(folder), here)]
            write_atomic(folder / _ANSWERS.format(here), json.dumps({"question": question, "trees": trees}))
            answered = question


def _answer_of(folder: Path, host: str, question: str) -> list[ProcessTree] | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        said = json.loads((folder / _ANSWERS.format(host)).read_text())
        if said["question"] == question:
            return [
                ProcessTree(RankProcess(**tree["member"]), tuple(map(ProcessSnapshot.from_json, tree["seen"])), tuple(tree["parents"]))
                for tree in said["trees"]
            ]
    return None


def _look_here(members: Sequence[RankProcess], here: str) -> list[ProcessTree]:
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
    """(process, its parent) of the rank and all below it; nothing where it is gone."""
    with suppress(psutil.Error):
        process = psutil.Process(member.pid)
        if abs(process.create_time() - member.started_s) > _SAME_START_S:
            return
        yield member.pid, process.ppid()
        for child in process.children(recursive=True):
            with suppress(psutil.Error):
                yield child.pid, child.ppid()
