"""Print what two runs needed to reach the same accuracy, and where their time went.

python examples/arithmetic/compare.py --accuracy 0.7 outputs/arithmetic/compare-tppo outputs/arithmetic/compare-ppo
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_rl.tracking.console import accuracy_text
from megatron_rl.tracking.metrics_file import read_metrics


@dataclass(frozen=True)
class Reached:
    """The moment of a run's first evaluation at or above the goal."""

    name: str
    step: int
    accuracy: str
    """With its standard error: the moment of a first passage is as uncertain."""
    training_s: float
    """Wall-clock time of training: without the evaluations, which both runs pay alike."""
    tokens: float
    stage_seconds: dict[str, float]


def reached(folder: Path, accuracy: float) -> Reached:
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row.step > 0]
    seconds = tokens = 0.0
    stages: dict[str, float] = {}
    for row in rows:
        metrics = row.metrics
        evaluation_s = metrics.get("time/evaluate_s", 0.0)
        seconds += metrics["step/time_s"] - evaluation_s
        tokens += metrics["step/tokens_generated"]
        for name, value in metrics.items():
            if name.startswith("time/"):
                stage = name.removeprefix("time/").removesuffix("_s")
                stages[stage] = stages.get(stage, 0.0) + value
        if metrics.get("eval/accuracy", 0.0) >= accuracy:
            measured = accuracy_text(metrics["eval/accuracy"], metrics.get("eval/accuracy_stderr"))
            return Reached(folder.name, row.step, measured, seconds, tokens, stages)
    best = max((row.metrics.get("eval/accuracy", 0.0) for row in rows), default=0.0)
    sys.exit(
        f"compare: {folder} did not reach {accuracy:.1%}; its best evaluation is {best:.1%} after {len(rows)} steps"
    )


def tables(runs: Sequence[Reached]) -> list[Table]:
    head = Table(title="to reach the same accuracy", title_justify="left")
    stages = Table(title="seconds by stage until then (stages may overlap)", title_justify="left")
    for table, first in ((head, "quantity"), (stages, "stage")):
        table.add_column(first)
        for run in runs:
            table.add_column(run.name, justify="right")
    head.add_row("steps", *(f"{run.step}" for run in runs))
    head.add_row("accuracy there", *(run.accuracy for run in runs))
    head.add_row("training time without evaluations", *(f"{run.training_s:.1f} s" for run in runs))
    head.add_row("seconds per step", *(f"{run.training_s / run.step:.2f}" for run in runs))
    head.add_row("tokens generated", *(f"{run.tokens:,.0f}" for run in runs))
    for name in sorted(runs[0].stage_seconds, key=lambda stage: -runs[0].stage_seconds[stage]):
        stages.add_row(name, *(f"{run.stage_seconds.get(name, 0.0):.1f}" for run in runs))
    return [head, stages]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accuracy", type=float, required=True)
    parser.add_argument("runs", nargs=2, type=Path)
    arguments = parser.parse_args()
    runs = [reached(folder, arguments.accuracy) for folder in arguments.runs]
    console = Console()
    for table in tables(runs):
        console.print(table)
    ratio = runs[1].training_s / runs[0].training_s
    console.print(f"{runs[1].name} needs {ratio:.2f} times the training time of {runs[0].name}")
    (arguments.runs[0].parent / "comparison.json").write_text(
        json.dumps({"accuracy": arguments.accuracy, "ratio": ratio, "runs": [run.__dict__ for run in runs]}, indent=2)
    )


if __name__ == "__main__":
    main()
