"""Accuracies of the runs under a folder, side by side: ``python examples/recipes/table.py outputs/recipes``."""

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_rl.tracking.metrics_file import read_metrics


def accuracies(run: Path) -> dict[int, float]:
    """Step -> greedy accuracy on held-out prompts; step 0 is before training."""
    rows = read_metrics(run / "metrics.jsonl")
    return {row.step: row.metrics["eval/accuracy"] for row in rows if "eval/accuracy" in row.metrics}


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: table.py FOLDER", file=sys.stderr)
        return 2
    runs = {file.parent.name: accuracies(file.parent) for file in sorted(Path(sys.argv[1]).glob("*/metrics.jsonl"))}
    if not runs:
        print(f"error: no run under {sys.argv[1]}; start one with examples/recipes/run.sh", file=sys.stderr)
        return 2
    steps = sorted({step for found in runs.values() for step in found})
    table = Table(title="accuracy on held-out prompts after so many steps", title_justify="left")
    table.add_column("recipe")
    for step in steps:
        table.add_column(str(step), justify="right")
    for name, found in sorted(runs.items(), key=lambda item: -max(item[1].values(), default=0.0)):
        table.add_row(name, *(f"{found[step]:.1%}" if step in found else "" for step in steps))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
