"""Finds which process waits for which, from snapshots of a run's processes. Pure.

A rank waits for its peers if its innermost frames are in a collective. The driver waits for its servers and reward
workers if its frames are in the stage runner. A process that waits for none, while others wait, is the process
that they wait for.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_rl.system.processes.process_probe import Frame, ProcessSnapshot

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
