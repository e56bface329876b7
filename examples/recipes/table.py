"""Print the recipes' accuracy over time: accuracy on held-out prompts after seconds of training, with standard errors.

Besides, how long a step takes, and for which shares of the time the servers and the trainer have nothing to do.
Reads runs called RECIPE-SEED, as run.sh names them, whose kept policies `megatron-rl evaluate` has measured. A standard error
is that of the mean over seeds and of the held-out problems together: all runs answer the same problems, so more seeds make
the first smaller and not the second. A run with one seed has the second alone, and is marked by its number of seeds.

    python examples/recipes/table.py outputs/recipes --start outputs/arithmetic/sft
"""

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from curves import Curve

from megatron_rl.run.checkpoints import policy_exports
from megatron_rl.tracking.metrics_file import read_metrics

QUARTERS = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Run:
    accuracy: Curve
    """Accuracy over seconds of training."""
    problems_error: float
    """Standard error of the last accuracy, over the held-out problems."""
    num_steps: int
    idle: tuple[float, float]
    """Shares of the time in which the servers and the trainer had nothing to do."""
    signal: tuple[float, float, float] | None
    """Only with windows: the share of trained tokens of unfinished responses, and the standard deviations of their advantages and
    of all others; means over the steps, before normalization."""


def measured(folder: Path) -> tuple[float, float]:
    """Accuracy of a policy and its standard error over the problems."""
    metrics = json.loads((folder / "evaluation.json").read_text())["metrics"]
    return metrics["eval/accuracy"], metrics.get("eval/accuracy_stderr", math.nan)


def read_run(folder: Path, start: float) -> Run:
    kept = policy_exports(folder)
    found = [measured(one.folder) for one in kept]
    curve = Curve(np.array([0.0, *(one.trained_s for one in kept)]), np.array([start, *(accuracy for accuracy, _ in found)]))
    rows = [row.metrics for row in read_metrics(folder / "metrics.jsonl") if row.step > 0]
    return Run(curve, found[-1][1], len(rows), (_idle(rows, "rollout"), _idle(rows, "trainer")), _signal(rows))


def _idle(rows: Sequence[dict[str, float]], lane: str) -> float:
    seconds = sum(row["step/time_s"] for row in rows)
    return sum(row[f"time/{lane}_idle_share"] * row["step/time_s"] for row in rows) / seconds


def _signal(rows: Sequence[dict[str, float]]) -> tuple[float, float, float] | None:
    both = [row for row in rows if "advantage/unfinished_std" in row and "advantage/finished_std" in row]
    if not both:
        return None
    going_on, ended = (sum(row[f"advantage/{kind}_tokens"] for row in rows) for kind in ("unfinished", "finished"))
    stds = {kind: statistics.fmean(row[f"advantage/{kind}_std"] for row in both) for kind in ("unfinished", "finished")}
    return going_on / (going_on + ended), stds["unfinished"], stds["finished"]


def cell(runs: Sequence[Run], second: float) -> str:
    """Mean and standard error, in per cent."""
    values = [float(run.accuracy.at([second])[0]) for run in runs]
    seeds_error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    problems_error = statistics.fmean(run.problems_error for run in runs)
    return f"{100 * statistics.fmean(values):.1f} ± {100 * math.hypot(seeds_error, problems_error):.1f} %"


def table(recipes: dict[str, list[Run]], end_s: float) -> str:
    """The table in Markdown; the recipe with the best final accuracy comes first."""
    seconds = [end_s * share for share in QUARTERS]
    times = [f"{second:.0f} s" for second in seconds]
    head = ["recipe", "seeds", "steps", "s per step", "rollout idle", "trainer idle", "at the start", *times]
    rows = [head, ["---"] * len(head)]
    order = sorted(recipes, key=lambda name: -statistics.fmean(r.accuracy.at([end_s])[0] for r in recipes[name]))
    for name in order:
        runs = recipes[name]
        steps = statistics.fmean(run.num_steps for run in runs)
        step_s = statistics.fmean(float(run.accuracy.times[-1]) / run.num_steps for run in runs)
        idle = [f"{statistics.fmean(shares):.0%}" for shares in zip(*(run.idle for run in runs), strict=True)]
        start = f"{100 * runs[0].accuracy.values[0]:.1f} %"
        cells = [cell(runs, second) for second in seconds]
        rows.append([f"`{name}`", str(len(runs)), f"{steps:.0f}", f"{step_s:.2f}", *idle, start, *cells])
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    for name in order:
        signals = [run.signal for run in recipes[name] if run.signal is not None]
        if signals:
            share, unfinished, finished = (statistics.fmean(column) for column in zip(*signals, strict=True))
            lines += [
                "",
                f"`{name}`: {share:.0%} of the trained tokens lie in windows whose response goes on; their advantages have a standard "
                f"deviation of {unfinished:.3f}, those of the others {finished:.3f}.",
            ]
    return "\n".join(lines)


def read_recipes(folder: Path, start: Path) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = defaultdict(list)
    start_accuracy, _ = measured(start)
    for policy in sorted(folder.glob("*-*/policy")):  # written when a run has come to its end
        if policy_exports(policy.parent):
            found[policy.parent.name.rpartition("-")[0]].append(read_run(policy.parent, start_accuracy))
    return dict(found)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of the runs, called RECIPE-SEED")
    parser.add_argument("--start", type=Path, required=True, help="the policy that all runs started from, evaluated")
    options = parser.parse_args(arguments)
    try:
        recipes = read_recipes(options.folder, options.start)
    except FileNotFoundError as error:
        print(f"error: {error.filename} is missing: a policy was not evaluated; start run.sh again", file=sys.stderr)
        return 2
    if not recipes:
        print(f"error: no finished run under {options.folder}; start one with examples/recipes/run.sh", file=sys.stderr)
        return 2
    end_s = min(float(run.accuracy.times[-1]) for runs in recipes.values() for run in runs)
    print(f"accuracy on held-out prompts after seconds of training\n\n{table(recipes, end_s)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
