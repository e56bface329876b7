"""``megatron-rl doctor --hang RUN``: which process waits for which in a running run, with the stacks of all its processes.

The command inspects the run from outside and changes nothing. Ranks, reward workers and managed servers write
their stacks on a signal (``system/processes/process_probe.py``); servers are polled over HTTP.
"""

import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.desk.doctor.wait_graph import RunSnapshot, ServerSnapshot, frames_text, rank_lines, verdict
from megatron_rl.errors import UserError
from megatron_rl.rollout.sglang.process.attached_server import attached_urls
from megatron_rl.system.http.addresses import LOOPBACK
from megatron_rl.system.http.json_http import HttpError, bearer, get_once
from megatron_rl.system.processes.process_probe import ProcessSnapshot
from megatron_rl.system.processes.run_processes import ProcessTree, probe_run, read_members

_ANSWER_S = 5.0
_SERVER, _GRADER = "sglang.launch_server", "megatron_rl.rewards.workers.worker"


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
