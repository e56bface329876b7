"""A trial of many minutes: runs that are killed at random moments and resumed must equal an uninterrupted run.

``python -m tests.kill_trial --kills 20`` trains a tiny model on two ranks, in one run after the other; each of them is
killed five times at most and goes on with run.resume=auto. After every kill: the exit status, and what is left of processes,
temporary files and shared memory. In the end rows, checkpoint and weights are compared with those of a whole run, bit for
bit, and MLflow is searched for points that stand in it twice. Ends with status 1 where anything is not as documented.

``--targets scheduler sandbox ...`` kills single processes of runs, which go on: each run must end with 0 and equal the whole run.
Episodes whose programs were killed must be masked and counted.

This module is also what a run is given as its reward: imported by rank 0 it notes which stages begin.
"""

import argparse
import contextlib
import inspect
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.registry import register, resolve
from megatron_rl.system.processes.signals import INTERRUPTED, STOPPED
from megatron_rl.tracking.samples_file import read_samples, sample_files
from tests.same_runs import differences

_KILLS_PER_RUN = 5
_END_S = 150.0
"""More than the grace (90 s), LEAVE_S and torchrun's own patience."""
_MARKER, _STAGES = "KILL_TRIAL", "KILL_TRIAL_STAGES"
_TRIAL = uuid.uuid4().hex
_STAGE_NAMES = (
    "generate", "score", "old_logprobs", "values", "advantages", "update_policy", "publish", "update_critic", "evaluate",
    "checkpoint", "record",
)  # fmt: skip
_BUSY = ("generate", "score", "update_policy", "publish")
_WAYS = (
    ("SIGKILL", "launcher"), ("SIGKILL", "0"), ("SIGKILL", "1"), ("SIGKILL", "group"), ("SIGTERM", "launcher"),
    ("SIGTERM", "group"), ("SIGUSR1", "launcher"), ("SIGHUP", "launcher"), ("SIGINT", "launcher"), ("SIGINT", "group"),
    ("SIGTERM", "0"), ("twice SIGINT", "launcher"),
)  # fmt: skip
MODES = {
    "tppo": [],
    "sync": ["schedule.mode=sync", "batch.window_tokens=0"],
    "async": ["schedule.mode=async"],
    "in_flight": ["schedule.mode=async", "schedule.weight_update=in_flight"],
    "colocated": ["rollout.placement=colocated", "parallel.num_ranks=1"],
    "lora": ["policy.lora={rank: 4, sync: adapters}", "critic.lora={rank: 4}", "policy.optimizer.lr=1e-2"],
}
TARGETS = {
    "server": "sglang.launch_server", "scheduler": "sglang::scheduler", "detokenizer": "sglang::detokenizer",
    "rollout": "rollout.workers.", "reward": "rewards.workers.", "sandbox": "sandbox.supervisor",
    "program": "agent.py", "supervisor": "program_supervisor.py",
}  # fmt: skip
"""Kinds of single processes of a run, by a part of their command lines; the last two are of an agent's episode."""
_OF_EPISODES = ("program", "supervisor")


def graded(response: str, answer: str) -> Score:
    """The reward of the runs."""
    return resolve("math").function(response, answer)


@register("coded", owns_processes=True)
def coded(response: str, answer: str) -> Score:
    """The reward of runs with a sandbox: 1 for responses of even length."""
    return resolve("code").function(f"def f():\n    return {len(response)}", tests="assert f() % 2 == 0")


def _note_stages(path: str) -> None:
    """Write a line to the file for every stage that starts in this process."""
    from megatron_rl.step.runner import StageRunner

    run = StageRunner.run

    def noted(name: str, action: Any) -> Any:
        def note(step: int) -> None:
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{name} {step + 1}\n")

        if inspect.iscoroutinefunction(action):

            async def later(step: int) -> Any:
                note(step)
                return await action(step)

            return later

        def now(step: int) -> Any:
            note(step)
            return action(step)

        return now

    def noting(self: Any, actions: Any, *steps: int) -> None:
        run(self, {name: noted(name, action) for name, action in actions.items()}, *steps)

    setattr(StageRunner, "run", noting)  # noqa: B010 (mypy lets nobody assign to a method)


if os.environ.get("RANK") == "0" and _STAGES in os.environ and "worker" not in sys.argv[0]:
    _note_stages(os.environ[_STAGES])


def _marked(mark: str) -> list[psutil.Process]:
    """All running processes that inherited this mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARKER, "").startswith(mark) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@dataclass
class _Run:
    """One start of a run: its launcher, and a mark that all its processes inherit."""

    folder: Path
    output_dir: Path
    overrides: list[str]

    def __post_init__(self) -> None:
        self.mark = f"{_TRIAL}-{uuid.uuid4().hex}"
        self.stages_file = self.folder / "stages.txt"
        self.stages_file.write_text("")
        (self.folder / "tmp").mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        environment |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder / "tmp"), _MARKER: self.mark}
        environment[_STAGES] = str(self.stages_file)
        arguments = ["train", "--config", str(self.folder / "recipe.yaml"), f"run.output_dir={self.output_dir}"]
        with open(self.output_dir.with_suffix(".out"), "a", encoding="utf-8") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl.cli", *arguments, "run.resume=auto", *self.overrides],
                stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
            )  # fmt: skip

    def stages(self) -> list[str]:
        return self.stages_file.read_text().splitlines()

    def num_begun(self, stage: str) -> int:
        return sum(line.split()[0] == stage for line in self.stages())

    def family(self) -> list[psutil.Process]:
        """All processes below the launcher, also those without the mark: sandboxes and programs get none of the environment."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def victims(self, target: str) -> list[psutil.Process]:
        """Processes of the kind ``target``: of those with the same command line the first, for rewards also its forks, the workers."""
        found, words = [], TARGETS[target]
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                own, above = (" ".join(one.cmdline()) for one in (process, process.parent()))
                found += [process] if words in own and (words not in above or target == "reward") else []
        return found

    def rank(self, number: str) -> int | None:
        """Process id of a rank; None before its start."""
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if process.environ().get("RANK") == number:
                        return process.pid
        return None

    def send(self, signal_name: str, target: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            if signal_name == "twice SIGINT":
                os.kill(self.process.pid, signal.SIGINT)
                time.sleep(0.5)
                os.kill(self.process.pid, signal.SIGINT)
            elif target == "group":
                os.killpg(self.process.pid, signal.Signals[signal_name])
            else:
                pid = self.process.pid if target == "launcher" else self.rank(target)
                os.kill(pid or self.process.pid, signal.Signals[signal_name])

    def wait_gone(self, family: Sequence[psutil.Process] = (), end_s: float = _END_S) -> tuple[int | None, float, list[str]]:
        """Exit status, seconds until no process was left, and the processes that had to be killed; ``family``: to wait for, too."""
        began_s = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(end_s)
        left, ended_s = [self.process], time.monotonic()
        while left and time.monotonic() < ended_s + _END_S:
            time.sleep(0.1)
            left = list({*_marked(self.mark), *filter(_lives, family)})
        for process in left:
            process.kill()
        return self.process.poll(), time.monotonic() - began_s, [" ".join(p.cmdline())[:80] for p in left]


def _wait_for_moment(run: _Run, moment: str, rng: random.Random, start_s: float) -> bool:
    """Wait for a random moment of the start, or shortly after a stage starts; False if the run ended first."""
    if moment == "start":
        return _still_runs(run, rng.uniform(0.5, start_s))
    turn, deadline_s = run.num_begun(moment) + rng.randint(1, 3), time.monotonic() + 300
    while run.num_begun(moment) < turn:
        if time.monotonic() > deadline_s or not _still_runs(run, 0.005):
            return False
    return _still_runs(run, rng.uniform(0, 1.0 if moment == "checkpoint" else 0.3))


def _still_runs(run: _Run, seconds: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return run.process.wait(seconds) is None
    return True


def _expected(signal_name: str, target: str) -> tuple[int, ...]:
    """Exit statuses as docs/cli.md has them."""
    if signal_name == "SIGKILL":
        return (-9,) if target in ("launcher", "group") else (1, -9)  # before there are ranks it is the launcher
    return (INTERRUPTED, STOPPED) if signal_name.startswith("twice") else (STOPPED,)


def _shared_memory() -> set[str]:
    """Entries of /dev/shm that no process has mapped."""
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped += maps.read_text()
    return {path.name for path in Path("/dev/shm").iterdir() if f"/dev/shm/{path.name}" not in mapped}


def _left_behind(run: _Run, shared: set[str]) -> list[str]:
    """Entries of shared memory and temporary files that remain after a run; ``shared``: entries from before."""
    for _ in range(20):  # entries of other programs disappear after a while
        if not (new := _shared_memory() - shared):
            break
        time.sleep(0.5)
    return sorted(f"/dev/shm/{name}" for name in new) + [path.name for path in (run.folder / "tmp").iterdir()]


def _wounded_run(run: _Run, target: str, seed: int, num_kills: int) -> tuple[int, list[str]]:
    """Kill processes of the kind ``target`` in one run; returns their number and the deviations from the documentation."""
    rng, shared, family, kills = random.Random(seed), _shared_memory(), set(run.family()), 0
    moments, spread_s = (("generate",), 5.0) if target in _OF_EPISODES else (_BUSY, 0.0)
    while kills < num_kills and _wait_for_moment(run, rng.choice(moments), rng, 0.0) and _still_runs(run, rng.uniform(0, spread_s)):
        deadline_s = time.monotonic() + 10
        while not (victims := run.victims(target)) and time.monotonic() < deadline_s and _still_runs(run, 0.01):
            pass
        family |= set(run.family())
        if victims:
            victim = rng.choice(victims)
            with contextlib.suppress(psutil.Error):
                above = victim.ppid()
                victim.kill()
                kills += 1
                print(f"SIGKILL      {target:11} process {victim.pid} of {above} at {run.stages()[-1]}", flush=True)
    status, seconds, left = run.wait_gone([*family], end_s=600)
    left += _left_behind(run, shared)
    print(f"{target}: {kills} kills, status {status} after {seconds:.1f} s, left {left or '-'}", flush=True)
    return kills, ([f"{target}: status {status}, left {left}"] if status or left else []) + ([] if kills else [f"{target}: never killed"])


def _killed_run(run_of: Any, seed: int, num_kills: int, start_s: float) -> tuple[int, list[str]]:
    """Start, kill and restart until the run ends; returns the number of kills and the deviations from the documentation."""
    rng, wrong, kills = random.Random(seed), [], 0
    ways = rng.sample(_WAYS, len(_WAYS))
    while True:
        run, shared = run_of(), _shared_memory()
        moment = rng.choice(["start", *_STAGE_NAMES]) if kills < num_kills else "end"
        if moment != "end" and _wait_for_moment(run, moment, rng, start_s):
            signal_name, target = ways[kills % len(ways)]
            kills += 1
            at, family = (run.stages() or ["start"])[-1], run.family()
            run.send(signal_name, target)
            expected = _expected(signal_name, target)
        else:
            signal_name, target, at, family, expected = "-", "-", "end", [], (0,)
        status, seconds, left = run.wait_gone(family)
        left += _left_behind(run, shared)
        line = f"{signal_name:12} {target:8} at {moment:13} ({at:18}) status {status} gone {seconds:5.1f} s left {left or '-'}"
        print(line, flush=True)
        if left or status not in expected:
            wrong.append(line)
        if status == 0 or status not in (*expected, 1, -9):
            return kills, wrong


def _twice_in_mlflow(run: Path) -> list[str]:
    store = run / "mlflow.db"
    if not store.exists():
        return []
    query = "select key, step, count(*) from metrics group by run_uuid, key, step having count(*) > 1"
    with contextlib.closing(sqlite3.connect(store)) as connection:
        return [f"MLflow has {key} of step {step} {count} times" for key, step, count in connection.execute(query)]


@contextlib.contextmanager
def _server(folder: Path, port: int, overrides: Sequence[str]) -> Iterator[str]:
    """The server of all runs of a mode; its log is in ``folder``."""
    arguments = ["serve", "--config", str(folder / "recipe.yaml"), "--port", str(port), "--log", str(folder / "server.log"), *overrides]
    process = subprocess.Popen([sys.executable, "-m", "megatron_rl.cli", *arguments])
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            time.sleep(0.5)
        yield f"rollout.urls=[http://127.0.0.1:{port}]"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kill_trial", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="of runs, in equal shares for all modes; of processes: per target, at most 3")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--targets", nargs="+", default=[], choices=list(TARGETS), help="kill single processes instead, in the first mode")
    parser.add_argument("--port", type=int, default=30917, help="of the server that all runs of a mode share; 0: each starts its own")
    parser.add_argument("--folder", type=Path, help="where everything is written (default: a new temporary folder)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration of all runs")
    options = parser.parse_args()
    if not options.targets and options.kills < len(options.modes):
        parser.error(f"--kills {options.kills} leaves some of {len(options.modes)} modes without a kill")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        return _trial(options)
    finally:
        for process in _marked(_TRIAL):
            process.kill()


def _trial(options: argparse.Namespace) -> int:
    from tests.integration.test_train import make_task

    folder = options.folder or Path(tempfile.mkdtemp(prefix="kill_trial-"))
    folder.mkdir(parents=True, exist_ok=True)
    make_task(folder)
    # A response that timed out on a busy machine is no difference of the runs.
    common = [f"run.num_steps={options.steps}", "run.save_every_steps=2", "eval.every_steps=3"]
    common += ["reward.timeout_s=300", "reward.start_timeout_s=300", *options.overrides]
    if options.targets:
        kills, wrong = _trial_of_targets(folder, options, [*common, *MODES[options.modes[0]]])
    else:
        kills, wrong = 0, []
        for index, mode in enumerate(options.modes):
            own = ["reward.name=tests.kill_trial:graded", *common, *MODES[mode]]
            attached = _server(folder, options.port, own) if options.port else contextlib.nullcontext("rollout.port=0")
            with attached as servers:
                done, found = _trial_of_mode(folder, options, index, [*own, servers])
            kills, wrong = kills + done, wrong + found
    print(f"{kills} kills, {len(wrong)} things not as documented; files: {folder}")
    return 1 if wrong else 0


def _whole_run(folder: Path, name: str, overrides: list[str]) -> tuple[Path, float]:
    """The folder of an uninterrupted run, and its seconds until the first stage."""
    whole, began_s = _Run(folder, folder / f"whole-{name}", overrides), time.monotonic()
    while not whole.stages() and _still_runs(whole, 0.1):
        pass
    start_s = time.monotonic() - began_s
    if whole.wait_gone(end_s=900)[0] != 0:
        sys.exit(f"the whole run failed: {whole.output_dir.with_suffix('.out')}")
    return whole.output_dir, start_s


def _trial_of_mode(folder: Path, options: argparse.Namespace, index: int, overrides: list[str]) -> tuple[int, list[str]]:
    """Kill and resume runs of one mode until it has its share of the kills; returns the kills and what is not as documented."""
    mode, share, kills, wrong = options.modes[index], range(index, options.kills, len(options.modes)), 0, []
    whole, start_s = _whole_run(folder, mode, overrides)
    for number in share:
        killed, seed = folder / f"killed-{number}-{mode}", options.seed + number
        print(f"run {number} ({mode}), seed {seed}", flush=True)
        done, found = _killed_run(lambda to=killed: _Run(folder, to, overrides), seed, min(_KILLS_PER_RUN, len(share) - kills), start_s)
        wrong += found + _compared(killed, whole, timed=mode == "in_flight") + ([] if done else [f"run {number}: never killed"])
        kills += done
        if not done or kills == len(share):
            break
    return kills, wrong


def _compared(run: Path, whole: Path, *, timed: bool = False) -> list[str]:
    """``timed``: the runs' numbers depend on the stages' durations; only their steps must be equal."""
    found = [text for text in differences(run, whole) if not timed or text.startswith("steps ")] + _twice_in_mlflow(run)
    equal = "every step once" if timed else "equal to the whole run, bit for bit"
    print(f"{run.name}:", "DIFFERENT" if found else equal, *found[:10], sep="\n  ", flush=True)
    return found


def _trial_of_targets(folder: Path, options: argparse.Namespace, common: list[str]) -> tuple[int, list[str]]:
    """Kill single processes, five per run at most; returns the kills and what is not as documented."""
    total, wrong, whole = 0, [], None
    own = ["reward.name=tests.kill_trial:coded", "rollout.num_workers=1", "rollout.port=0", "rollout.max_restarts=9", *common]
    for number, target in enumerate(options.targets):
        of_episodes = target in _OF_EPISODES
        if whole is None and not of_episodes:
            whole, _ = _whole_run(folder, "targets", own)
        home = _agents(folder / "agents") if of_episodes else folder
        run = _Run(home, home / f"without-{target}", [f"run.num_steps={options.steps}"] if of_episodes else own)
        kills, found = _wounded_run(run, target, options.seed + number, min(3, options.kills))
        total += kills
        wrong += found + (_unmasked(run.output_dir, kills) if of_episodes else _compared(run.output_dir, whole))
    return total, wrong


def _agents(folder: Path) -> Path:
    """The folder of a run whose episodes are programs."""
    from tests.chat_models import make_chat_model
    from tests.integration.test_agents import RECIPE, SLOW_AGENT

    folder.mkdir(exist_ok=True)
    make_chat_model(folder / "model")
    rows = [{"id": str(i), "prompt": f"{i}+{i + 1}", "answer": "1"} for i in range(24)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "agent.py").write_text(SLOW_AGENT)
    recipe = RECIPE.format(folder=folder, preset="grpo", python=sys.executable, argument="")
    recipe = recipe.replace("num_ranks: 1", "num_ranks: 2").replace("name: math", "name: tests.kill_trial:graded")
    (folder / "recipe.yaml").write_text(recipe)
    return folder


def _unmasked(run: Path, kills: int) -> list[str]:
    """Deviations from the law of killed programs: one row each without a reward, of which no token trains."""
    rows = read_samples(sample_files(run).values()).to_pylist()
    ended = [row for row in rows if "killed" in row["error"]]
    print(f"{run.name}: {len(ended)} of {len(rows)} episodes were killed", flush=True)
    found = [] if len({row["id"] for row in ended}) == kills else [f"{len(ended)} episodes say that they were killed, not {kills}"]
    found += [f"unscored: {row['error']}" for row in rows if row["error"] and "killed" not in row["error"]]
    return found + [f"a killed episode trains: {row}" for row in ended if row["reward"] is not None or row["trained_tokens"]]


if __name__ == "__main__":
    sys.exit(main())
