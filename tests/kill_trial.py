"""A trial of many minutes: runs that are killed at random moments and resumed must equal an uninterrupted run.

``python -m tests.kill_trial --kills 20`` trains a tiny model on two ranks, in one run after the other; each of them is
killed five times and goes on with run.resume=auto. After every kill: the exit status, and what is left of processes,
temporary files and shared memory. In the end rows, checkpoint and weights are compared with those of a whole run, bit for
bit, and MLflow is searched for points that stand in it twice. Ends with status 1 where anything is not as documented.

This module is also what a run is given as its reward: imported by rank 0 it notes which stages begin.
"""

import argparse
import contextlib
import inspect
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.registry import resolve
from megatron_rl.system.processes.signals import INTERRUPTED, STOPPED
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
_WAYS = (
    ("SIGKILL", "launcher"), ("SIGKILL", "0"), ("SIGKILL", "1"), ("SIGKILL", "group"), ("SIGTERM", "launcher"),
    ("SIGTERM", "group"), ("SIGUSR1", "launcher"), ("SIGHUP", "launcher"), ("SIGINT", "launcher"), ("SIGINT", "group"),
    ("SIGTERM", "0"), ("twice SIGINT", "launcher"),
)  # fmt: skip
MODES = {"tppo": [], "sync": ["schedule.mode=sync", "batch.window_tokens=0"]}


def graded(response: str, answer: str) -> Score:
    """The reward of the runs."""
    return resolve("math").function(response, answer)


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

    def rank(self, number: str) -> int | None:
        """Process id of the launcher; None before the start."""
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

    def wait_gone(self) -> tuple[int | None, float, list[str]]:
        """Exit status, seconds until no process was left, and the processes that had to be killed."""
        began_s = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        left = _marked(self.mark)
        while left and time.monotonic() < began_s + _END_S:
            time.sleep(0.1)
            left = _marked(self.mark)
        for process in left:
            process.kill()
        return self.process.poll(), time.monotonic() - began_s, [" ".join(p.cmdline())[:80] for p in left]


def _wait_for_moment(run: _Run, moment: str, rng: random.Random, start_s: float) -> bool:
    """Wait for a random moment of the start, or shortly after a stage starts; False if the run ended first."""
    if moment == "start":
        return _still_runs(run, rng.uniform(0.5, start_s))
    turn, deadline_s = rng.randint(1, 3), time.monotonic() + 300
    while sum(line.split()[0] == moment for line in run.stages()) < turn:
        if time.monotonic() > deadline_s or not _still_runs(run, 0.005):
            return False
    return _still_runs(run, rng.uniform(0, 1.0 if moment == "checkpoint" else 0.3))


def _still_runs(run: _Run, seconds: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.process.wait(seconds)
        return False
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


def _left_in_shared_memory(before: set[str]) -> list[str]:
    """Entries of shared memory that remain; entries of other programs disappear after a while."""
    for _ in range(20):
        new = _shared_memory() - before
        if not new:
            break
        time.sleep(0.5)
    return sorted(f"/dev/shm/{name}" for name in new)


def _killed_run(run_of: Any, seed: int, num_kills: int, start_s: float) -> list[str]:
    """Start, kill and restart until the run ends; returns deviations from the documentation."""
    rng, wrong, kills = random.Random(seed), [], 0
    ways = rng.sample(_WAYS, len(_WAYS))
    while True:
        run, shared = run_of(), _shared_memory()
        moment = rng.choice(["start", *_STAGE_NAMES]) if kills < num_kills else "end"
        if moment != "end" and _wait_for_moment(run, moment, rng, start_s):
            signal_name, target = ways[kills % len(ways)]
            kills += 1
            at = (run.stages() or ["start"])[-1]
            run.send(signal_name, target)
            expected = _expected(signal_name, target)
        else:
            signal_name, target, at, expected = "-", "-", "end", (0,)
        status, seconds, left = run.wait_gone()
        left += _left_in_shared_memory(shared)
        left += [path.name for path in (run.folder / "tmp").iterdir()]
        line = f"{signal_name:12} {target:8} at {moment:13} ({at:18}) status {status} gone {seconds:5.1f} s left {left or '-'}"
        print(line, flush=True)
        if left or status not in expected:
            wrong.append(line)
        if status == 0 or status not in (*expected, 1, -9):
            return wrong


def _twice_in_mlflow(run: Path) -> list[str]:
    store = run / "mlflow.db"
    if not store.exists():
        return []
    query = "select key, step, count(*) from metrics group by run_uuid, key, step having count(*) > 1"
    with contextlib.closing(sqlite3.connect(store)) as connection:
        return [f"MLflow has {key} of step {step} {count} times" for key, step, count in connection.execute(query)]


@contextlib.contextmanager
def _server(folder: Path, port: int) -> Iterator[str]:
    arguments = ["serve", "--model-path", str(folder / "model"), "--port", str(port), "--log", str(folder / "server.log")]
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
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--port", type=int, default=30917, help="of the server that all runs share; 0: each starts its own")
    parser.add_argument("--folder", type=Path, help="where everything is written (default: a new temporary folder)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration of all runs")
    options = parser.parse_args()
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
    wrong: list[str] = []
    with _server(folder, options.port) if options.port else contextlib.nullcontext("rollout.port=0") as servers:
        common = [f"run.num_steps={options.steps}", "run.save_every_steps=2", "eval.every_steps=3", servers]
        # A response that timed out on a busy machine is no difference of the runs.
        common += ["reward.name=tests.kill_trial:graded", "reward.timeout_s=300", "reward.start_timeout_s=300", *options.overrides]
        start_s = {}
        for mode in options.modes:
            whole = _Run(folder, folder / f"whole-{mode}", [*common, *MODES[mode]])
            began_s = time.monotonic()
            while not whole.stages() and _still_runs(whole, 0.1):
                pass
            start_s[mode] = time.monotonic() - began_s
            if whole.wait_gone()[0] != 0:
                sys.exit(f"the whole run failed: {whole.output_dir.with_suffix('.out')}")
        for number, first in enumerate(range(0, options.kills, _KILLS_PER_RUN)):
            mode = options.modes[number % len(options.modes)]
            killed = folder / f"killed-{number}-{mode}"
            num_kills = min(_KILLS_PER_RUN, options.kills - first)
            print(f"run {number} ({mode}), seed {options.seed + number}", flush=True)
            overrides = [*common, *MODES[mode]]
            wrong += _killed_run(
                lambda to=killed, o=overrides: _Run(folder, to, o), options.seed + number, num_kills, start_s[mode]
            )
            found = [*differences(killed, folder / f"whole-{mode}"), *_twice_in_mlflow(killed)]
            print(f"run {number} ({mode}):", "equal to the whole run, bit for bit" if not found else "DIFFERENT", *found[:10], sep="\n  ")
            wrong += found
    print(f"{options.kills} kills, {len(wrong)} things not as documented; files: {folder}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
