"""A number of the runs under a folder, by arm and step: mean over the seeds, and its standard error.

Runs are folders called ARM-SEED, as the run.sh of fire, line_rewards and prompt_selection name them. The standard error is
that over seeds (the spread of repeated training); with one seed there is none. Instead of a folder, a study of effects.py.

    python examples/arms_table.py outputs/fire/runs [--metric eval/accuracy] [--steps 0 10 20]
    python examples/arms_table.py examples/agents/repair/results.json --study agents --ends
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.tracking.metrics_file import read_metrics

Curve = dict[int, float]
"""Step -> number; step 0 is before training."""


def curves(folder: Path, metric: str) -> dict[str, list[Curve]]:
    """Arm -> a curve per seed, both in the order of their names; a run that lacks the metric has no curve."""
    found: dict[str, list[Curve]] = defaultdict(list)
    for file in sorted(folder.glob("*-*/metrics.jsonl")):
        rows = read_metrics(file)
        curve = {row.step: row.metrics[metric] for row in rows if metric in row.metrics}
        if curve:
            found[file.parent.name.rpartition("-")[0]].append(curve)
    return dict(found)


def stored_curves(file: Path, study: str) -> dict[str, list[Curve]]:
    """The same, from the results of examples/effects/effects.py."""
    arms = json.loads(file.read_text())[study]
    return {arm: [dict(zip(map(int, one["steps"]), one["metric"], strict=True)) for one in seeds.values()] for arm, seeds in arms.items()}


def cell(numbers: Sequence[float], *, percent: bool) -> str:
    """``mean ± standard error``; empty without numbers."""
    if not numbers:
        return ""
    scale, digits, unit = (100, 1, " %") if percent else (1, 2, "")
    error = statistics.stdev(numbers) / len(numbers) ** 0.5 if len(numbers) > 1 else None
    spread = "" if error is None else f" ± {error * scale:.{digits}f}"
    return f"{statistics.fmean(numbers) * scale:.{digits}f}{spread}{unit}"


def table(arms: dict[str, list[Curve]], steps: Sequence[int], *, percent: bool) -> str:
    """Return the table in Markdown."""
    lines = [f"| steps | {' | '.join(map(str, steps))} |", "|---" * (len(steps) + 1) + "|"]
    for arm, found in arms.items():
        cells = [cell([curve[step] for curve in found if step in curve], percent=percent) for step in steps]
        lines.append(f"| `{arm}` ({len(found)} seed{'s' * (len(found) > 1)}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def ends_table(arms: dict[str, list[Curve]], *, percent: bool) -> str:
    """The table of first and last numbers, and of what each seed gained between them, in Markdown."""
    lines = ["| arm | seeds | at the start | at the end | gain | smallest gain |", "|---" * 6 + "|"]
    for arm, found in arms.items():
        first, last = ([curve[pick(curve)] for curve in found] for pick in (min, max))
        gains = [b - a for a, b in zip(first, last, strict=True)]
        cells = [cell(numbers, percent=percent) for numbers in (first, last, gains, [min(gains)])]
        lines.append(f"| `{arm}` | {len(found)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of runs, or effects.py's results.json with --study")
    parser.add_argument("--study", default="", help="study of results.json")
    parser.add_argument("--ends", action="store_true", help="first and last numbers, and the gains of the seeds")
    parser.add_argument("--metric", default="eval/accuracy", help="a name of metrics.jsonl")
    parser.add_argument("--steps", type=int, nargs="+", default=[], help="columns; default: every step with the number")
    options = parser.parse_args(arguments)
    arms = stored_curves(options.folder, options.study) if options.study else curves(options.folder, options.metric)
    if not arms:
        print(f"error: no run under {options.folder} has {options.metric}; start some with run.sh", file=sys.stderr)
        return 2
    percent = "accuracy" in options.metric or options.metric.endswith("_share")
    if options.ends:
        print(ends_table(arms, percent=percent))
        return 0
    steps = options.steps or sorted({step for found in arms.values() for curve in found for step in curve})
    print(f"{options.metric} after so many steps\n")
    print(table(arms, steps, percent=percent))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
