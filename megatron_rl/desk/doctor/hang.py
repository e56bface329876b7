"""``megatron-rl doctor --hang RUN``: which process waits for which in a running run, with the stacks of all its processes.

The command inspects the run from outside and changes nothing. Ranks, reward workers and managed servers write
their stacks on a signal (``system/processes/process_probe.py``); servers are polled over HTTP.

A rank waits for its peers if its innermost frames are in a collective. The driver waits for its servers and reward
workers if its frames are in the stage runner. A process that waits for none, while others wait, is the process
that they wait for.
"""

import math
import os
import re
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron_rl.errors import UserError
from megatron_rl.rollout.sglang.process.attached_server import attached_urls
from megatron_rl.system.http.addresses import LOOPBACK
from megatron_rl.system.http.json_http import HttpError, bearer, get_once
from megatron_rl.system.processes.process_probe import Frame, ProcessSnapshot
from megatron_rl.system.processes.run_processes import ProcessTree, probe_run, read_members

_NOTHING_HANGS = "nothing hangs"
_LANES = ("rollout", "host", "trainer")
"""Lanes in the notes of the driver's stages."""
_COLLECTIVE_FILES = ("torch/distributed/", "megatron_rl/parallel/collectives.py", "megatron_rl/parallel/pipeline_shapes.py")
_BETWEEN = ("contextlib.py", "torch/utils/", "torch/autograd/")
"""Uninformative frames between a collective and its caller."""
_RUNNER, _WAITS_FOR_STAGES = "megatron_rl/step/runner.py", "_next_event"
_LIBRARIES = ("site-packages/", "dist-packages/", "/lib/python3", "<")
_STOPPED = ("stopped", "tracing-stop")
_MOVES_S = 5.0
"""A wait that started more recently is not a hang."""
_LONG_S = 10.0
"""A program that runs longer than this while it is scored should be checked."""
_ANSWER_S = 5.0
_SERVER, _GRADER = "sglang.launch_server", "megatron_rl.rewards.workers.worker"


@dataclass(frozen=True)
class ServerSnapshot:
    """Snapshot of a server: its health, load and local processes."""

    url: str
    problem: str = ""
    """Reason why the server counts as hung, or an empty string if it replies."""
    load: str = ""
    """The server's own report of its load."""
    processes: tuple[ProcessSnapshot, ...] = ()
    """Processes of the server on this node."""


@dataclass(frozen=True)
class RunSnapshot:
    ranks: Mapping[int, ProcessSnapshot]
    servers: Sequence[ServerSnapshot] = ()
    graders: Sequence[ProcessSnapshot] = ()
    programs: Mapping[int, Sequence[ProcessSnapshot]] = field(default_factory=dict)
    """Processes started by each reward worker, keyed by its pid."""
    silent_hosts: Sequence[str] = ()
    now_s: float = field(default_factory=time.time)


class Diagnosis(NamedTuple):
    """A process that all others wait for, with the remedy."""

    text: str
    hangs: bool = True
    """False if nothing hangs as seen from outside."""


def rank_lines(run: RunSnapshot) -> list[str]:
    """Activity of the ranks, one line per group of equal ranks; then servers and reward workers that matter."""
    groups: dict[str, list[int]] = defaultdict(list)
    since: dict[str, list[float]] = defaultdict(list)
    for rank, seen in sorted(run.ranks.items()):
        text = _describe_rank(rank, seen)
        groups[text].append(rank)
        since[text] += [when for _, when in _notes(seen).values()]
    lines = []
    for text, ranks in groups.items():
        several = len(ranks) > 1
        verb, rest = text.split(" ", 1)
        # Conjugate for several ranks: "is" becomes "are", "waits" becomes "wait".
        verb = {"is": "are"}.get(verb, verb.removesuffix("s")) if several else verb
        lines.append(f"{_ranks(ranks)} {verb} {rest}{_since(since[text], run.now_s)}")
    if 0 in run.ranks:
        lines += [
            f"the driver runs the stage {name}{_since([when], run.now_s)}"
            for name, (lane, when) in run.ranks[0].notes.items()
            if lane in _LANES
        ]
    lines += [f"server {s.url}: {s.problem or s.load or 'replies'}" for s in run.servers]
    lines += [_grader_line(grader, run) for grader in run.graders if _is_busy(grader)]
    return lines


def verdict(run: RunSnapshot) -> list[Diagnosis]:
    """Findings, at least one: the last resort is a finding that nothing hangs."""
    # Report the strongest evidence only: a dead process explains all waits.
    findings = [*_dead_or_stopped(run)] or [*_missing_ranks(run)] or [*_rollout_side(run)]
    if run.silent_hosts:
        text = (
            f"{', '.join(run.silent_hosts)} did not reply within 20 s: run `megatron-rl doctor --hang` there also; a node whose "
            "first rank no longer runs Python does not reply"
        )
        findings.append(Diagnosis(text))
    return findings or [Diagnosis(f"{_NOTHING_HANGS} as seen from outside: repeat this in a minute, and compare", hangs=False)]


def _dead_or_stopped(run: RunSnapshot) -> Iterator[Diagnosis]:
    processes = [(f"rank {rank}", seen) for rank, seen in sorted(run.ranks.items())]
    processes += [(f"server {s.url}", seen) for s in run.servers for seen in s.processes]
    processes += [(f"reward worker {grader.pid}", grader) for grader in run.graders]
    processes += [(f"a program of reward worker {pid}", seen) for pid, programs in run.programs.items() for seen in programs]
    for name, seen in processes:
        if seen.state in _STOPPED:
            yield Diagnosis(
                f"{name} is stopped (process {seen.pid} on {seen.host}, by SIGSTOP or a debugger), and others wait for it: "
                f"kill -CONT {seen.pid}"
            )
        elif seen.state in ("gone", "zombie"):
            yield Diagnosis(
                f"{name} is gone (process {seen.pid} on {seen.host}): see its log and `dmesg` for the cause; "
                "the launcher should stop the others"
            )
    for server in run.servers:
        if server.problem and all(seen.state not in _STOPPED for seen in server.processes):
            yield Diagnosis(f"server {server.url} hangs: {server.problem}{_where(server.processes)}; see its log (logs/sglang-*.log)")


def _missing_ranks(run: RunSnapshot) -> Iterator[Diagnosis]:
    """Ranks that wait for no peer, while others wait for them."""
    waiting = [rank for rank, seen in run.ranks.items() if _waits_for_peers(seen)]
    driver = run.ranks.get(0)
    # If the driver waits for servers, all other ranks wait for the driver: the rollout is the cause.
    if not waiting or (driver is not None and _waits_for_stages(driver)):
        return
    missing = [rank for rank in sorted(run.ranks) if rank not in waiting]
    for rank in missing:
        seen = run.ranks[rank]
        newest_s = max((since_s for _, since_s in seen.notes.values()), default=-math.inf)
        moves = run.now_s - newest_s < _MOVES_S
        recent = f"{_NOTHING_HANGS}: the work that others wait for has just started. " if moves else ""
        waits = f"{_ranks(waiting)} wait{'s' if len(waiting) == 1 else ''}"
        yield Diagnosis(
            f"{recent}{waits} for rank {rank} (process {seen.pid} on {seen.host}), which is in "
            f"{_location(seen) or 'code that gave no stack'}{_cpu_text(seen)}{_since([t for _, t in _notes(seen).values()], run.now_s)}",
            hangs=not moves,
        )
    if not missing:
        collectives = sorted({_collective(seen) for seen in run.ranks.values()})
        yield Diagnosis(
            f"all ranks are in a collective ({', '.join(collectives)}): "
            + (
                "they are in different ones, so their code diverged before; the stacks show where"
                if len(collectives) > 1
                else "a message was lost or the network is down (NCCL_DEBUG=INFO; megatron-rl doctor tries an all-reduce)"
            )
        )


def _rollout_side(run: RunSnapshot) -> Iterator[Diagnosis]:
    driver = run.ranks.get(0)
    if driver is None or not _waits_for_stages(driver):
        return
    stages = [name for name, (lane, _) in driver.notes.items() if lane in ("rollout", "host")]
    slow = [g for g in run.graders if _is_busy(g) and run.now_s - g.notes["scores"][1] > _LONG_S]
    for grader in slow:
        yield Diagnosis(
            f"the driver waits for {' and '.join(stages) or 'a stage'}, which waits for a reward worker: {_grader_line(grader, run)}; "
            "it is killed at reward.timeout_s"
        )
    busy = [f"{server.url} ({server.load})" for server in run.servers if server.load]
    if not slow and busy:
        yield Diagnosis(f"the driver waits for {' and '.join(stages) or 'a stage'}; its servers reply and are busy: {', '.join(busy)}")


def _describe_rank(rank: int, seen: ProcessSnapshot) -> str:
    """A rank's activity; starts with a verb in the singular."""
    if seen.state == "gone":
        return "is gone"
    if seen.state in _STOPPED:
        return f"is stopped{_of_work(seen)}"
    if not seen.frames:
        return f"gives no stack ({seen.state}){_of_work(seen)}"
    if rank == 0 and _waits_for_stages(seen):
        return "waits for its servers and reward workers"
    if "waits" in seen.notes and _collective(seen):
        return f"waits for {seen.notes['waits'][0]}"
    if _waits_for_peers(seen):
        return f"waits in {_collective(seen)}{_of_work(seen)}"
    return f"is in {_location(seen)}{_of_work(seen)}{_cpu_text(seen)}"


def _grader_line(grader: ProcessSnapshot, run: RunSnapshot) -> str:
    what = f"{grader.role} (process {grader.pid}) scores {grader.notes['scores'][0]}{_since([grader.notes['scores'][1]], run.now_s)}"
    programs = [f"{seen.command[:80]} (process {seen.pid}, {seen.state})" for seen in run.programs.get(grader.pid, ())]
    place = f", in {_location(grader)}" if grader.frames else ""
    return what + place + (f", and runs {', '.join(programs)}" if programs else "")


def _is_busy(grader: ProcessSnapshot) -> bool:
    return "scores" in grader.notes


def _waits_for_stages(seen: ProcessSnapshot) -> bool:
    return any(frame.file.endswith(_RUNNER) and frame.function == _WAITS_FOR_STAGES for frame in seen.frames[:6])


def _waits_for_peers(seen: ProcessSnapshot) -> bool:
    return bool(_collective(seen)) and seen.state not in _STOPPED


def _collective(seen: ProcessSnapshot) -> str:
    """Name of the collective that the innermost frames are in: its outermost public function, or its caller."""
    name, is_collective = "", False
    for frame in seen.frames:
        if any(part in frame.file for part in _COLLECTIVE_FILES):
            is_collective = True
            name = name if frame.function.startswith(("_", "wrapper")) else frame.function
        elif not is_collective or name or not any(part in frame.file for part in _BETWEEN):
            return name or (f"a collective of {frame.function}" if is_collective else "")
    return name or ("a collective" if is_collective else "")


def _location(seen: ProcessSnapshot) -> str:
    """The innermost frame, and the innermost frame outside libraries if that is another one."""
    if not seen.frames:
        return ""
    own = next((frame for frame in seen.frames if not any(part in frame.file for part in _LIBRARIES)), None)
    innermost = seen.frames[0]
    return str(innermost) if own in (None, innermost) else f"{innermost.function}, called by {own}"


def _where(processes: Sequence[ProcessSnapshot]) -> str:
    places = [f"process {seen.pid} is in {_location(seen)}{_cpu_text(seen)}" for seen in processes if seen.frames]
    return f" ({'; '.join(places)})" if places else ""


def _cpu_text(seen: ProcessSnapshot) -> str:
    return f", at {seen.cpu_share:.0%} of a core" if seen.cpu_share >= 0.1 else ""


def _notes(seen: ProcessSnapshot) -> dict[str, tuple[str, float]]:
    """The process's own notes without the driver's stages, narrowest first."""
    return {key: seen.notes[key] for key in ("waits", "work", "stage") if key in seen.notes and seen.notes[key][0]}


def _of_work(seen: ProcessSnapshot) -> str:
    notes = [text for key in ("work", "stage") if (text := seen.notes.get(key, ("", 0.0))[0])]
    return f", {notes[0]}" + (f" of the stage {notes[1]}" if len(notes) > 1 else "") if notes else ""


def _since(times_s: Sequence[float], now_s: float) -> str:
    """Seconds since the newest note: older notes have ended or have a wider scope."""
    return f" since {max(0.0, now_s - max(times_s)):.0f} s" if times_s else ""


def _ranks(ranks: Sequence[int]) -> str:
    """Describe ranks as text, such as "rank 3" or "ranks 0-2 and 5"."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][-1] == rank - 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    words = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in ranges]
    return f"rank{'s' if len(ranks) > 1 else ''} {' and '.join([', '.join(words[:-1]), words[-1]] if len(words) > 1 else words)}"


def frames_text(frames: Sequence[Frame]) -> str:
    """Stack frames as text, one per line, innermost first."""
    return "\n".join(f"    {frame}" for frame in frames)


def print_hang(folder: Path) -> int:
    """Print a summary, then the stacks. Returns the exit status: 1 if a process that others wait for was found."""
    if not folder.is_dir():
        raise UserError(f"doctor --hang: {folder} is not a folder; give the output folder of a run (run.output_dir)")
    trees, silent = probe_run(folder, read_members(folder))
    # Silent hosts may still run ranks, so only a complete picture counts as ended.
    if trees and not silent and all(tree.seen[0].state in ("gone", "zombie") for tree in trees):
        ended = (folder / "summary.json").is_file()
        print(
            f"the run in {folder} has ended; see its summary.json"
            if ended
            else f"the run in {folder} has no process left: it was killed or failed; see its log for the cause. "
            "Resume it from the newest checkpoint with run.resume=auto"
        )
        return 0 if ended else 1
    seen = snapshot_run(folder, trees, silent)
    for line in rank_lines(seen):
        print(line)
    findings = verdict(seen)
    for finding in findings:
        print(f"=> {finding.text}")
    print()
    for name, process in _all_processes(seen):
        print(f"{name}: process {process.pid} on {process.host}, {process.state}, {process.role} ({process.command[:80]})")
        if process.frames:
            print(frames_text(process.frames))
    return int(any(finding.hangs for finding in findings))


def snapshot_run(folder: Path, trees: Sequence[ProcessTree], silent_hosts: Sequence[str]) -> RunSnapshot:
    """Snapshot of the run; polls the servers for their health and load."""
    ranks = {tree.member.rank: tree.seen[0] for tree in trees}
    driver = next((tree for tree in trees if tree.member.rank == 0), None)
    if driver is None:
        return RunSnapshot(ranks, silent_hosts=silent_hosts)
    seen = {process.pid: process for process in driver.seen}
    parents = dict(zip(seen, driver.parents, strict=True))
    # The fork server has the same command: a reward worker is a process whose parent matches also.
    graders = [seen[pid] for pid, parent in parents.items() if _is(_GRADER, seen.get(pid)) and _is(_GRADER, seen.get(parent))]
    programs = {grader.pid: [seen[pid] for pid in _descendants(grader.pid, parents)] for grader in graders}
    return RunSnapshot(ranks, list(_servers(folder, seen, parents)), graders, programs, silent_hosts)


def _is(word: str, seen: ProcessSnapshot | None) -> bool:
    return seen is not None and word in seen.command.split(" ")


def _descendants(pid: int, parents: Mapping[int, int]) -> Iterator[int]:
    for child, parent in parents.items():
        if parent == pid:
            yield child
            yield from _descendants(child, parents)


def _servers(folder: Path, seen: Mapping[int, ProcessSnapshot], parents: Mapping[int, int]) -> Iterator[ServerSnapshot]:
    """Snapshots of the managed servers, then of the servers that the recipe names."""
    for pid, process in seen.items():
        # SGLang's subprocesses have the same command: take only the topmost process.
        if not _is(_SERVER, process) or _is(_SERVER, seen.get(parents[pid])):
            continue
        words, processes = process.command.split(" "), [process, *(seen[child] for child in _descendants(pid, parents))]
        host = _option(words, "host")
        url = f"http://{host}:{_option(words, 'port')}"
        # A server on the loopback address of another node cannot be polled from here.
        is_unreachable = host in LOOPBACK and process.host != socket.gethostname()
        yield ServerSnapshot(url, processes=tuple(processes)) if is_unreachable else _poll_server(
            url, _key_in(_option(words, "config")), processes
        )
    rollout = _recipe(folder).get("rollout") or {}
    key = os.environ.get(rollout.get("api_key_env") or "", "")
    try:
        urls = attached_urls(rollout.get("urls") or [], rollout.get("urls_file") or "", key)
    except OSError as error:
        yield ServerSnapshot(rollout.get("urls_file") or rollout["urls"][0], str(error))
        return
    for url in dict.fromkeys(urls):
        yield _poll_server(url, key, [])


def _poll_server(url: str, key: str, processes: Sequence[ProcessSnapshot]) -> ServerSnapshot:
    problem, load = "", ""
    try:
        status = get_once(f"{url}/health", timeout_s=_ANSWER_S).status
        problem = "" if status == 200 else f"/health replies {status}"
        reply = get_once(f"{url}/v1/loads?include=core", timeout_s=_ANSWER_S, headers=bearer(key))
        if reply.status == 200:
            load = _describe_load(reply.json())
    except HttpError as error:
        problem = f"no reply to /health or /v1/loads within {_ANSWER_S:g} s ({error})"
    except ValueError:
        load = ""
    return ServerSnapshot(url, problem, load, tuple(processes))


def _describe_load(reply: Any) -> str:
    loads = reply.get("loads") if isinstance(reply, dict) else None
    parts = [load for load in loads if isinstance(load, dict)] if isinstance(loads, list) else []
    running, waiting = (sum(int(p.get(key) or 0) for p in parts) for key in ("num_running_reqs", "num_waiting_reqs"))
    return f"{running} requests running, {waiting} waiting" if running or waiting else ""


def _option(words: Sequence[str], name: str) -> str:
    flag = f"--{name}"
    return words[words.index(flag) + 1] if flag in words[:-1] else ""


def _key_in(config_file: str) -> str:
    """API key in the server's own configuration file, which only its user can read; or an empty string."""
    try:
        match = re.search(r'^api-key: "?([^"\n]*)', Path(config_file).read_text(), re.MULTILINE) if config_file else None
    except OSError:
        return ""
    return match[1] if match else ""


def _recipe(folder: Path) -> dict[str, Any]:
    try:
        recipe = yaml.safe_load((folder / "config.yaml").read_text())
    except (OSError, yaml.YAMLError):
        return {}
    return recipe if isinstance(recipe, dict) else {}


def _all_processes(run: RunSnapshot) -> Iterator[tuple[str, ProcessSnapshot]]:
    yield from ((f"rank {rank}", seen) for rank, seen in sorted(run.ranks.items()))
    yield from ((f"server {server.url}", seen) for server in run.servers for seen in server.processes)
    for grader in run.graders:
        yield f"reward worker {grader.pid}", grader
        yield from ((f"program of reward worker {grader.pid}", seen) for seen in run.programs.get(grader.pid, ()))
