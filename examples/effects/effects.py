"""Run the studies of claims.yml over seeds, and print which effects separate from their baselines.

    python examples/effects/effects.py run dapo --seeds 1 2 3 4 5    # one process at a time; finished runs are kept
    python examples/effects/effects.py table                         # of results.json, with intervals

`run` appends to results.json what every seed gave: the metric by step and by generated tokens. An arm's effect is the mean of its metric
over the second half of the run, less that of the baseline, paired by seed, with a bootstrap interval of 95 % (examples/curves.py). An
interval that holds 0 does not separate. The half and the baseline were chosen before any run.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
from curves import Curve, bootstrap

from megatron_rl.system.files.atomic_files import write_atomic
from megatron_rl.tracking.metrics_file import read_metrics

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
BEGIN, END = "<!-- examples/effects/effects.py table -->", "<!-- end -->"
NUM_STEPS, EVERY_STEPS, MIN_SEEDS = 40, 5, 5
Results = dict[str, dict[str, dict[str, dict[str, list[float]]]]]
"""Study -> arm -> seed -> steps, tokens, metric."""


def claims() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((HERE / "claims.yml").read_text())


def commands(name: str, study: Mapping[str, Any], seed: int) -> dict[Path, list[str]]:
    """Map the run's folder of each arm to its command; of a study with its own script, to that script."""
    if "command" in study:
        return {Path(study["runs"]) / f"{arm}-{seed}": shlex.split(study["command"]) for arm in study["arms"]}
    recipes = [word for recipe in study["recipe"] for word in ("--config", recipe)]
    steps = study.get("num_steps", NUM_STEPS)
    every = max(steps * EVERY_STEPS // NUM_STEPS, 1)
    fixed = [f"run.num_steps={steps}", f"run.seed={seed}", "run.overwrite=true", "run.save_every_steps=0"]
    fixed += [f"eval.every_steps={every}", "eval.num_prompts=500", "tracking.mlflow=false", "tracking.report_every_steps=0"]
    found = {}
    for arm, overrides in study["arms"].items():
        folder = Path("outputs/effects") / name / f"{arm}-{seed}"
        words = [*fixed, *study.get("common", ()), *overrides, f"run.output_dir={folder}"]
        found[folder] = [".venv/bin/megatron-rl", "train", *recipes, *words]
    return found


def run(name: str, seeds: Sequence[int]) -> None:
    study = claims()[name]
    if setup := study.get("setup"):
        subprocess.run(["bash", "-c", setup], cwd=ROOT, check=True)
    for seed in seeds:
        for folder, command in commands(name, study, seed).items():
            if not (ROOT / folder / "summary.json").is_file():
                print(f"== {name}: {folder.name}", flush=True)
                subprocess.run(command, cwd=ROOT, env={**os.environ, "SEEDS": str(seed)}, check=True)
            _keep(name, study, folder)


def _keep(name: str, study: Mapping[str, Any], folder: Path) -> None:
    arm, _, seed = folder.name.rpartition("-")
    file = ROOT / study["results"] if "results" in study else RESULTS
    results: Results = json.loads(file.read_text()) if file.is_file() else {}
    results.setdefault(name, {}).setdefault(arm, {})[seed] = read_curve(ROOT / folder, study.get("metric", "eval/accuracy"))
    write_atomic(file, json.dumps(results, indent=1) + "\n")


def stored() -> Results:
    """What all studies gave so far; a study with a file of its own (``results``) has it there."""
    files = [RESULTS, *(ROOT / study["results"] for study in claims().values() if "results" in study)]
    return {name: study for file in files if file.is_file() for name, study in json.loads(file.read_text()).items()}


def read_curve(folder: Path, metric: str) -> dict[str, list[float]]:
    """The metric of a run, with the steps and generated tokens at which it was measured."""
    curve: dict[str, list[float]] = {"steps": [], "tokens": [], "metric": []}
    tokens = 0.0
    for row in read_metrics(folder / "metrics.jsonl"):
        tokens += row.metrics.get("step/tokens_generated", 0.0)
        if metric in row.metrics and row.step not in curve["steps"]:
            for key, number in (("steps", row.step), ("tokens", tokens), ("metric", round(row.metrics[metric], 5))):
                curve[key].append(number)
    return curve


def second_halves(arms: Mapping[str, Mapping[str, Mapping[str, list[float]]]], axis: str, seeds: Sequence[str]) -> dict[str, np.ndarray]:
    """Arm -> [seeds] mean of the metric over the second half of the length that all runs have."""
    ends = {curves[seed][axis][-1] for curves in arms.values() for seed in seeds}
    if axis == "steps" and len(ends) > 1:
        raise SystemExit(f"runs of {', '.join(arms)} end at the steps {sorted(ends)}; remove those that were stopped, and run them again")
    end = min(ends)
    grid = np.linspace(end / 2, end, 11)

    def mean(curve: Mapping[str, list[float]]) -> float:
        return Curve(grid, Curve(np.array(curve[axis], float), np.array(curve["metric"])).at(grid)).mean()

    return {arm: np.array([mean(curves[seed]) for seed in seeds]) for arm, curves in arms.items()}


def table(results: Results) -> str:
    """The table of all studies in Markdown, accuracies in percent."""
    lines = ["| study | arm | seeds | second half | less the baseline | |", "|---|---|---|---|---|---|"]
    for name, study in claims().items():
        found = {arm: results[name][arm] for arm in study["arms"] if arm in results.get(name, {})}
        seeds = sorted(set.intersection(*(set(curves) for curves in found.values())), key=int) if found else []
        if len(found) < len(study["arms"]) or not seeds:
            lines.append(f"| {name} | | 0 | not run | | |")
            continue
        means = second_halves(found, study.get("axis", "steps"), seeds)
        baseline = means[next(iter(means))]
        for arm, values in means.items():
            level = bootstrap(len(seeds), lambda w, values=values: float(w @ values))
            shown = f"| {name} | `{arm}` | {len(seeds)} | {_text(level)} %"
            less = bootstrap(len(seeds), lambda w, values=values - baseline: float(w @ values))
            rest = "baseline | |" if values is baseline else f"{_text(less)} points | {verdict(less, len(seeds))} |"
            lines.append(f"{shown} | {rest}")
    return "\n".join(lines)


def with_table(readme: str, text: str) -> str:
    before, _, rest = readme.partition(f"{BEGIN}\n")
    return f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


def verdict(less: Any, num_seeds: int) -> str:
    if num_seeds < MIN_SEEDS:
        return "too few seeds"
    if less.low > 0:
        return "more"
    return "less" if less.high < 0 else "does not separate"


def _text(one: Any) -> str:
    if not np.isfinite([one.low, one.high]).all():
        return f"{100 * one.value:.1f} [one seed: no interval]"
    return f"{100 * one.value:.1f} [{100 * one.low:.1f}, {100 * one.high:.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parts = parser.add_subparsers(dest="part", required=True)
    running = parts.add_parser("run", help="train the arms of studies, and keep what each seed gave")
    running.add_argument("names", nargs="*", help="studies of claims.yml; default: all")
    running.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parts.add_parser("table", help="print the table").add_argument("--write", action="store_true", help="put it into README.md")
    options = parser.parse_args()
    if options.part == "table":
        text, readme = table(stored()), HERE / "README.md"
        print(text)
        if options.write:
            readme.write_text(with_table(readme.read_text(), text))
        return
    for name in options.names or claims():
        run(name, options.seeds)


if __name__ == "__main__":
    main()
