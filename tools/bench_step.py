"""Measure the cost of a training step beyond the models: seconds by stage and by part, of the real loop on a tiny random model.

    python tools/bench_step.py --slots 256 --window 28 --response-tokens 80 --ranks 2

Parts of a stage's seconds, as the driver (rank 0) spends them: ``passes`` are inside Megatron; ``ranks`` are waits for the
other ranks' results; ``messages`` are calls and batches sent to the ranks; ``servers`` are waits for generation
and for the servers' part of a publish; ``own`` is the rest: the loop's own Python. CPU seconds are those of all processes while
the stage ran, so concurrent work is included. Medians over the steps after the first two.
"""

import argparse
import inspect
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
RANK = "_rank"
"""First argument of the ranks that this program starts."""
NUM_WARM_UP_STEPS = 2
PARTS = ("passes", "ranks", "messages", "servers", "own")
PROCESSES = ("driver", "ranks", "servers")
LABELS = "abcdefghijklmnop"


def main() -> None:
    if sys.argv[1:2] == [RANK]:
        run_rank(json.loads(sys.argv[2]))
        return
    arguments = parse()
    from rich.console import Console

    from megatron_rl.system.processes.torchrun import launch

    with tempfile.TemporaryDirectory() as folder:
        write_task(Path(folder), arguments)
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // arguments["ranks"])))
        asked = json.dumps(arguments | {"folder": folder})
        status = launch(["--standalone", f"--nproc-per-node={arguments['ranks']}", __file__, RANK, asked])
        if status:
            sys.exit(status)
        found = summary(json.loads((Path(folder) / "steps.json").read_text()))
    if arguments["json"]:
        Path(arguments["json"]).write_text(json.dumps(found, indent=2) + "\n")
    console = Console(width=120)
    console.print(table(found))
    used = ", ".join(f"{name} {found['cpu'][name]:.2f}" for name in PROCESSES)
    console.print(
        f"step {found['seconds']:.3f} s, {found['tokens']:.0f} tokens generated; the loop's own share "
        f"{found['own_share']:.1%}; CPU seconds {sum(found['cpu'].values()):.2f} "
        f"({used})"
    )


def parse() -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("tppo", "sync"), default="tppo")
    parser.add_argument("--slots", type=int, default=256, help="responses per step; groups of 4")
    parser.add_argument("--window", type=int, default=28, help="tokens per window, in mode tppo")
    parser.add_argument("--response-tokens", type=int, default=80)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", metavar="FILE", help="also write the medians to FILE")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the recipe")
    arguments = parser.parse_args()
    if arguments.slots < 4 or arguments.slots % 4:
        parser.error(f"--slots is a multiple of 4, got {arguments.slots}")
    if arguments.steps <= NUM_WARM_UP_STEPS:
        parser.error(f"--steps is at least {NUM_WARM_UP_STEPS + 1}: the first {NUM_WARM_UP_STEPS} do not count")
    if not 1 <= arguments.window <= arguments.response_tokens:
        parser.error(f"--window is 1 to --response-tokens ({arguments.response_tokens}), got {arguments.window}")
    return vars(arguments)


def write_task(folder: Path, arguments: dict[str, Any]) -> None:
    """A model without weights, and prompts for it. Few of a random model's responses end by themselves."""
    sys.path.insert(0, str(EXAMPLES))
    from tiny_model import SPECIAL_TOKENS, write_tiny_model

    words = [*SPECIAL_TOKENS, *"0123456789=:", *LABELS]
    write_tiny_model(folder / "model", words, "", vocab_size=len(words), max_tokens=arguments["response_tokens"] + 64)
    sums = [(label, a, b) for label in LABELS for a in range(10) for b in range(10)]
    rows = [{"prompt": f"{label}:{a}b:{b}=", "answer": str(a + b)} for label, a, b in sums]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def recipe(arguments: dict[str, Any]) -> dict[str, Any]:
    """Keys of the run, as ``key=value`` gives them."""
    folder, slots = Path(arguments["folder"]), arguments["slots"]
    return {
        "preset": "tppo" if arguments["mode"] == "tppo" else "ppo",
        "run.output_dir": folder / "run",
        "run.num_steps": arguments["steps"],
        "run.save_every_steps": 0,
        "policy.path": folder / "model",
        "policy.init": "random",
        "critic.warmup_steps": 0,
        "parallel.num_ranks": arguments["ranks"],
        "rollout.num_servers": arguments["servers"],
        "batch.num_prompts_per_step": slots // 4,
        "batch.num_samples_per_prompt": 4,
        "batch.max_prompt_tokens": 48,
        "batch.max_response_tokens": arguments["response_tokens"],
        "batch.window_tokens": arguments["window"] if arguments["mode"] == "tppo" else 0,
        "batch.policy_minibatch_size": max(4, slots // 2),
        "batch.critic_minibatch_size": max(4, slots // 4),
        "batch.max_tokens_per_microbatch": 8192,
        "data.train_files": f"[{folder / 'train.jsonl'}]",
        "reward.name": "math",
        "reward.options": "{extract: last_number}",
        "eval.every_steps": 0,
        "tracking.mlflow": "false",
    }


# ------------------------------------------------------------------------------------------------------ on the ranks


def run_rank(arguments: dict[str, Any]) -> None:
    from megatron_rl.config.load import load_config

    Path(arguments["folder"], "empty.yaml").write_text("{}\n")
    overrides = [f"{key}={value}" for key, value in recipe(arguments).items()] + arguments["overrides"]
    config = load_config([str(Path(arguments["folder"], "empty.yaml"))], overrides)
    from megatron_rl.commands import write_run_report
    from megatron_rl.step.driver import train
    from megatron_rl.tracking.metrics_file import read_metrics

    if os.environ["RANK"] != "0":
        train(config)
        return
    with Probes().installed() as probes:
        train(config, write_report=write_run_report)  # as `megatron-rl train` does, because a report costs the driver time
    rows = read_metrics(Path(arguments["folder"], "run", "metrics.jsonl"))[-arguments["steps"] :]
    Path(arguments["folder"], "steps.json").write_text(
        json.dumps(
            [
                {
                    "stages": probes.steps[number],
                    "seconds": row.metrics["step/time_s"],
                    "tokens": row.metrics["step/tokens_generated"],
                }
                for number, row in enumerate(rows)
            ]
        )
    )


class Probes:
    """Clocks around the loop's stages, and around what they wait for."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, dict[str, Any]]] = {}
        self._spent: Counter[str] = Counter()
        self._main = threading.main_thread()

    @contextmanager
    def installed(self) -> Iterator["Probes"]:
        from megatron_rl.parallel import collectives
        from megatron_rl.step.loop import TrainingLoop
        from megatron_rl.training.trainer_rank import TrainerRank
        from megatron_rl.weights.publish import WeightPublisher

        part_of = {
            (TrainerRank, "execute"): "passes",
            (collectives, "gather_tensors"): "ranks",
            (collectives, "gather_objects"): "ranks",
            (collectives, "broadcast_object"): "messages",
            (WeightPublisher, "publish"): "servers",
        }
        before = [(owner, name, getattr(owner, name)) for owner, name in part_of]
        actions = TrainingLoop.actions
        for owner, name, function in before:
            setattr(owner, name, self._clocked(function, part_of[owner, name]))
        TrainingLoop.actions = lambda loop, graph: {  # type: ignore[method-assign]
            name: self._stage(name, action) for name, action in actions(loop, graph).items()
        }
        try:
            yield self
        finally:
            TrainingLoop.actions = actions  # type: ignore[method-assign]
            for owner, name, function in before:
                setattr(owner, name, function)

    def _clocked(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Seconds in ``function`` on the main thread, less those of others inside it, count as ``part``."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not self._main:
                return function(*args, **kwargs)
            inside_before, started_s = sum(self._spent.values()), time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                inside_s = sum(self._spent.values()) - inside_before
                self._spent[part] += time.perf_counter() - started_s - inside_s

        return run

    def _stage(self, name: str, action: Callable[[int], Any]) -> Callable[[int], Any]:
        def begin() -> tuple[float, float, dict[str, float], Counter[str]]:
            return time.perf_counter(), time.thread_time(), cpu_seconds(), Counter(self._spent)

        def end(step: int, began: tuple[float, float, dict[str, float], Counter[str]]) -> None:
            started_s, thread_s, cpu, spent = began
            seconds, own = time.perf_counter() - started_s, time.thread_time() - thread_s
            parts = dict.fromkeys(PARTS, 0.0)
            if inspect.iscoroutinefunction(action):
                parts |= {"own": own, "servers": seconds - own}
            elif threading.current_thread() is self._main:
                parts |= {part: value - spent[part] for part, value in self._spent.items()}
                parts["own"] = seconds - sum(parts.values())
            else:
                parts["own"] = seconds
            now = cpu_seconds()
            cpu_used = {process: now[process] - cpu[process] for process in PROCESSES}
            self.steps.setdefault(step, {})[name] = {"seconds": seconds, **parts, "cpu": cpu_used, "ended": now}

        if inspect.iscoroutinefunction(action):

            async def run_coroutine(step: int) -> Any:
                began = begin()
                try:
                    return await action(step)
                finally:
                    end(step, began)

            return run_coroutine

        def run(step: int) -> Any:
            began = begin()
            try:
                return action(step)
            finally:
                end(step, began)

        return run


def cpu_seconds() -> dict[str, float]:
    """So far, of the driver, the other ranks and the servers (with the graders) of this run."""
    import psutil

    own = psutil.Process()
    found = dict.fromkeys(PROCESSES, 0.0)
    mine = {process.pid for process in own.children(recursive=True)}
    for process in [own, *own.parent().children(recursive=True)] if own.parent() else [own]:
        try:
            used = process.cpu_times()
        except psutil.Error:
            continue
        if process.pid != own.pid or process is own:
            kind = "driver" if process is own else "servers" if process.pid in mine else "ranks"
            found[kind] += used.user + used.system
    return found


# ------------------------------------------------------------------------------------------------------ the account


def summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the steps after the warm-up, by stage and part."""
    steady = steps[NUM_WARM_UP_STEPS:]
    names = list(steady[0]["stages"])
    stages = {
        name: {part: statistics.median(s["stages"][name][part] for s in steady) for part in ("seconds", *PARTS)}
        | {"cpu": statistics.median(sum(s["stages"][name]["cpu"].values()) for s in steady)}
        for name in names
    }
    # From the end of one step's last stage to that of the next.
    ends = [step["stages"][names[-1]]["ended"] for step in steps[NUM_WARM_UP_STEPS - 1 :]]
    cpu = {
        process: statistics.median(later[process] - earlier[process] for earlier, later in itertools.pairwise(ends))
        for process in PROCESSES
    }
    seconds = statistics.median(step["seconds"] for step in steady)
    own = sum(stage["own"] + stage["messages"] for stage in stages.values())
    return {
        "seconds": seconds,
        "tokens": statistics.median(step["tokens"] for step in steady),
        "own_seconds": own,
        "own_share": own / seconds,
        "cpu": cpu,
        "stages": stages,
    }


def table(found: dict[str, Any]) -> Any:
    from rich.table import Table

    result = Table(title="seconds per step (medians)", title_justify="left")
    result.add_column("stage")
    for column in ("seconds", *PARTS, "CPU, all processes"):
        result.add_column(column, justify="right")
    for name, stage in found["stages"].items():
        result.add_row(name, *(f"{stage[column]:.4f}" for column in ("seconds", *PARTS, "cpu")))
    return result


if __name__ == "__main__":
    main()
