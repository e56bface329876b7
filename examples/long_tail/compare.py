"""T-PPO and synchronous PPO over the same time of training: accuracy, time to a level, finished responses per second.

Reads the runs that compare.sh leaves in a folder, called ARM-SEED: policies/*/kept.json and evaluation.json (accuracy at
seconds of training; nothing was evaluated on that clock), metrics.jsonl and timeline.json. Speed is that of the steady
state: the first ceil(L_max / W) steps, in which a pool that started with fresh prompts has no long responses to finish
yet, are left out, at least two and at most half of a run; an arm with a run that is too short for that is marked. Of several
baselines the best one counts, at every level and in every resample anew. Prints Markdown; writes comparison.json (with the
curve and the speed of each run), comparison.md and the picture (SVG for light and dark pages, PNG) next to the runs.

    python examples/long_tail/compare.py outputs/long_tail/runs --start outputs/long_tail/sft [--baselines ppo ppo-32]
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
from comparison_picture import draw
from curves import Bounds, Curve, Estimate, bootstrap, on_grid, ratio, time_to

from megatron_rl.config.derived import effective_window_tokens
from megatron_rl.config.load import load_config
from megatron_rl.run.checkpoints import policy_exports
from megatron_rl.tracking.metrics_file import MetricsRow, read_metrics
from megatron_rl.tracking.timeline import Span, read_timeline

SHARES_OF_GAIN = (0.5, 0.75, 0.9)
"""Levels of accuracy: the start, and these shares of what the best baseline gains on it in the whole time."""
FEWEST_LEFT_OUT = 2
"""Steps at the start of every run: code is compiled and memory is claimed in them."""


class MissingData(Exception):
    """A run that cannot be compared; the text says what it lacks."""


@dataclass(frozen=True)
class Run:
    """One training run in its folder."""

    name: str
    accuracy: Curve
    """Accuracy over seconds of training."""
    speed: dict[str, float]
    """Quantities of the steady state, by the names of SPEEDS."""
    is_steady: bool
    """The steps that were left out are as many as the longest response takes."""


SPEEDS = {
    "finished_per_s": "finished responses per second",
    "s_per_finished": "seconds per finished response",
    "tokens_per_s": "tokens generated per second",
    "s_per_step": "seconds per step",
    "rollout_idle": "rollout idle",
    "trainer_idle": "trainer idle",
}


def accuracy_of(folder: Path) -> float:
    """Accuracy of the policy in ``folder``, as `megatron-rl evaluate` or evaluate.py measured it."""
    file = folder / "evaluation.json"
    if not file.is_file():
        raise MissingData(f"{file} is missing: the policy has not been evaluated; run compare.sh again")
    return float(json.loads(file.read_text())["metrics"]["eval/accuracy"])


def read_run(folder: Path, start_accuracy: float) -> Run:
    kept = policy_exports(folder)
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row.step > 0]
    if not kept or not rows:
        raise MissingData(f"{folder} has no policies of several times; run.keep_policy_every_s makes them")
    times = [0.0, *(one.trained_s for one in kept)]
    curve = Curve(np.array(times), np.array([start_accuracy, *(accuracy_of(one.folder) for one in kept)]))
    config = load_config([folder / "config.yaml"], [])
    num_windows = math.ceil(config.batch.max_response_tokens / effective_window_tokens(config))
    left_out = max(min(num_windows, len(rows) // 2), FEWEST_LEFT_OUT)
    if len(rows) <= left_out:
        raise MissingData(f"{folder} has {len(rows)} steps; its first {left_out} are no steady state: train for longer")
    return Run(folder.name, curve, steady_speed(rows[left_out:], read_timeline(folder / "timeline.json")), left_out >= num_windows)


def steady_speed(rows: Sequence[MetricsRow], spans: Sequence[Span]) -> dict[str, float]:
    """Rates and idle shares over the steps of ``rows``; ``spans`` may have more steps."""
    seconds = sum(row.metrics["step/time_s"] for row in rows)
    finished = sum(row.metrics["rollout/num_finished"] for row in rows)
    end_s = rows[-1].time_s
    return {
        "finished_per_s": finished / seconds,
        "s_per_finished": seconds / finished if finished else math.inf,
        "tokens_per_s": sum(row.metrics["step/tokens_generated"] for row in rows) / seconds,
        "s_per_step": seconds / len(rows),
        "rollout_idle": idle_share(spans, "rollout", end_s - seconds, end_s),
        "trainer_idle": idle_share(spans, "trainer", end_s - seconds, end_s),
    }


def idle_share(spans: Sequence[Span], lane: str, start_s: float, end_s: float) -> float:
    """Share of the time from start to end in which no stage of ``lane`` runs."""
    busy_s, until_s = 0.0, start_s
    for span in sorted((s for s in spans if s.lane == lane), key=lambda s: s.start_s):
        begin_s, stop_s = max(span.start_s, until_s), min(span.end_s, end_s)
        if stop_s > begin_s:
            busy_s += stop_s - begin_s
            until_s = stop_s
    return 1.0 - busy_s / (end_s - start_s)


@dataclass(frozen=True)
class Arm:
    """The runs of one way to train, by seed."""

    name: str
    runs: dict[str, Run]

    def values(self, seeds: Sequence[str], grid: np.ndarray) -> np.ndarray:
        """Accuracy, [seeds, len(grid)]."""
        return on_grid([self.runs[seed].accuracy for seed in seeds], grid)

    def speeds(self, seeds: Sequence[str], name: str) -> np.ndarray:
        return np.array([self.runs[seed].speed[name] for seed in seeds])


@dataclass(frozen=True)
class Comparison:
    """The figures that are printed and drawn; accuracies are in [0, 1], times in seconds of training."""

    baselines: list[str]
    grid: list[float]
    levels: list[float]
    num_seeds: dict[str, int]
    is_steady: dict[str, bool]
    accuracy: dict[str, list[Estimate]]
    """Accuracy by arm, on the grid."""
    mean_accuracy: dict[str, Estimate]
    """Mean accuracy over the whole time: the area under the curve."""
    time_to_level: dict[str, list[Estimate]]
    speed: dict[str, dict[str, Estimate]]
    times_faster: dict[str, list[Estimate]]
    """Time of the fastest baseline to a level by that of the arm, over the seeds that all of them have."""
    times_finished: dict[str, Estimate]
    """Finished responses per second by the most of a baseline, likewise."""
    more_accuracy: dict[str, Estimate]
    """Mean accuracy less the highest of a baseline, likewise."""
    runs: dict[str, dict[str, dict[str, Any]]]
    """Accuracy at seconds of training, and speed, by arm and seed."""


def compare(arms: Sequence[Arm], baselines: Sequence[Arm], grid: np.ndarray) -> Comparison:
    start = float(next(iter(baselines[0].runs.values())).accuracy.values[0])
    best = max(float(arm.values(list(arm.runs), grid).mean(axis=0).max()) for arm in baselines)
    levels = [start + share * (best - start) for share in SHARES_OF_GAIN]
    found = Comparison([arm.name for arm in baselines], grid.tolist(), levels, *({} for _ in range(10)))
    for arm in arms:
        _add_arm(found, arm, grid)
        if arm not in baselines:
            _add_ratios(found, arm, baselines, grid)
    return found


def _add_arm(found: Comparison, arm: Arm, grid: np.ndarray) -> None:
    seeds = list(arm.runs)
    values, name, number = arm.values(seeds, grid), arm.name, len(seeds)
    found.runs[name] = {seed: _numbers_of(run) for seed, run in arm.runs.items()}
    found.num_seeds[name] = number
    found.is_steady[name] = all(run.is_steady for run in arm.runs.values())
    found.accuracy[name] = [bootstrap(number, lambda w, i=i: float(w @ values[:, i])) for i in range(len(grid))]
    areas = np.array([Curve(grid, row).mean() for row in values])
    found.mean_accuracy[name] = bootstrap(number, lambda w: float(w @ areas))
    found.time_to_level[name] = [
        bootstrap(number, lambda w, level=level: time_to(values, grid, level, w)) for level in found.levels
    ]
    found.speed[name] = {}
    for quantity in SPEEDS:
        numbers = arm.speeds(seeds, quantity)
        found.speed[name][quantity] = bootstrap(number, lambda w, numbers=numbers: float(w @ numbers))


def _numbers_of(run: Run) -> dict[str, Any]:
    """Return what the run contributes, with digits that a reader can check a figure by."""
    curve = {"trained_s": run.accuracy.times.round(3).tolist(), "accuracy": run.accuracy.values.round(5).tolist()}
    return {**curve, **{name: float(f"{number:.5g}") for name, number in run.speed.items()}}


def _add_ratios(found: Comparison, arm: Arm, baselines: Sequence[Arm], grid: np.ndarray) -> None:
    seeds = [seed for seed in arm.runs if all(seed in one.runs for one in baselines)]
    if not seeds:
        raise MissingData(f"{', '.join([arm.name, *found.baselines])} have no seed in common")
    ours, theirs, number = arm.values(seeds, grid), [one.values(seeds, grid) for one in baselines], len(seeds)

    def faster(weights: np.ndarray, level: float) -> Bounds:
        times = [time_to(values, grid, level, weights) for values in theirs]
        return ratio((min(low for low, _ in times), min(high for _, high in times)), time_to(ours, grid, level, weights))

    found.times_faster[arm.name] = [bootstrap(number, lambda w, level=level: faster(w, level)) for level in found.levels]
    speed, speeds = arm.speeds(seeds, "finished_per_s"), [one.speeds(seeds, "finished_per_s") for one in baselines]
    found.times_finished[arm.name] = bootstrap(number, lambda w: float(w @ speed) / max(float(w @ one) for one in speeds))
    means = [np.array([Curve(grid, row).mean() for row in values]) for values in (ours, *theirs)]
    found.more_accuracy[arm.name] = bootstrap(number, lambda w: float(w @ means[0]) - max(float(w @ one) for one in means[1:]))


def _names(found: Comparison) -> str:
    """Return the baselines as the tables name them."""
    names = " and ".join(f"`{name}`" for name in found.baselines)
    return names if len(found.baselines) == 1 else f"the better of {names}"


def tables(found: Comparison) -> str:
    """Return the tables in Markdown."""
    return "\n\n".join((_accuracy_table(found), _time_table(found), _speed_table(found), _reading(found)))


def _accuracy_table(found: Comparison) -> str:
    end_s = found.grid[-1]
    chosen = [int(np.argmin(np.abs(np.array(found.grid) - end_s * share))) for share in (0.25, 0.5, 0.75, 1.0)]
    head = ["accuracy after", *(f"{found.grid[i]:.0f} s" for i in chosen), f"mean over {end_s:.0f} s"]
    head.append(f"that, less that of {_names(found)}")
    rows = []
    for name, curve in found.accuracy.items():
        numbers = [*(curve[i] for i in chosen), found.mean_accuracy[name]]
        more = found.more_accuracy.get(name)
        cells = [text(one, 100, 1, " %") for one in numbers]
        rows.append([f"`{name}`", *cells, text(more, 100, 1, " points") if more else ""])
    return _markdown(head, rows)


def _time_table(found: Comparison) -> str:
    head = ["seconds to an accuracy of"]
    for level in found.levels:
        head += [f"{level:.1%}", "times faster"]
    rows = []
    for name, times in found.time_to_level.items():
        cells, faster = [f"`{name}`"], found.times_faster.get(name)
        for index, time in enumerate(times):
            cells += [text(time, 1, 0), text(faster[index], 1, 2) if faster else ""]
        rows.append(cells)
    return _markdown(head, rows)


def _speed_table(found: Comparison) -> str:
    head = ["steady state", "seeds", *SPEEDS.values(), f"finished per second, relative to {_names(found)}"]
    rows = []
    for name, speed in found.speed.items():
        cells = [f"`{name}`" + ("" if found.is_steady[name] else " *"), str(found.num_seeds[name])]
        for quantity, one in speed.items():
            share = quantity.endswith("_idle")
            digits = 0 if share or quantity == "tokens_per_s" else 3 if quantity == "s_per_finished" else 2
            cells.append(text(one, 100 if share else 1, digits, " %" if share else ""))
        times = found.times_finished.get(name)
        rows.append([*cells, text(times, 1, 2) if times else ""])
    return _markdown(head, rows)


def _reading(found: Comparison) -> str:
    shares = ", ".join(f"{share * 100:.0f}" for share in SHARES_OF_GAIN)
    return (
        "In brackets: bootstrap intervals of 95 % over seeds; of ratios and differences over the seeds that both arms have. The "
        f"levels are the start and {shares} % of what {_names(found)} gains on it at its best. `>` and `<` stand before bounds: a "
        "run did not reach the level in its time; an interval is open where such runs leave it open."
        + (
            ""
            if all(found.is_steady.values())
            else " *: half of the steps were left out, fewer than the longest response may take: not quite the steady state."
        )
    )


def text(one: Estimate, scale: float, digits: int, unit: str = "") -> str:
    """``value [low, high] unit``; without an interval where there is a single seed."""

    def number(value: float) -> str:
        return f"{value * scale:.{digits}f}" if math.isfinite(value) else "open"

    value = "unknown" if math.isnan(one.value) else f"{one.relation}{number(one.value)}"
    if math.isinf(one.low) and math.isinf(one.high):
        return value + unit
    return f"{value} [{number(one.low)}, {number(one.high)}]{unit}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _finite(found: Any) -> Any:
    """``found`` with None instead of numbers that JSON lacks."""
    if isinstance(found, dict):
        return {name: _finite(value) for name, value in found.items()}
    if isinstance(found, list):
        return [_finite(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def read_arms(folder: Path, start: Path, names: Sequence[str]) -> list[Arm]:
    """Finished runs by arm, in the order of ``names``; all arms in alphabetical order if it is empty. Folders are named ARM-SEED."""
    start_accuracy = accuracy_of(start)
    found: dict[str, dict[str, Run]] = {name: {} for name in names}
    for policy in sorted(folder.glob("*-*/policy")):  # written when a run has finished
        run = policy.parent
        name, _, seed = run.name.rpartition("-")
        if not names or name in names:
            found.setdefault(name, {})[seed] = read_run(run, start_accuracy)
    missing = [name for name, runs in found.items() if not runs]
    if missing or not found:
        raise MissingData(f"{folder} has no finished run of {', '.join(missing) or 'any arm'}; compare.sh makes them")
    return [Arm(name, runs) for name, runs in found.items()]


def grid_of(arms: Sequence[Arm], end_s: float, num_points: int) -> np.ndarray:
    """Moments in seconds, from 0 to ``end_s``, or to the time that all runs have trained for."""
    common_s = min(float(run.accuracy.times[-1]) for arm in arms for run in arm.runs.values())
    if end_s > common_s:
        raise MissingData(f"--seconds {end_s:g}: a run has trained for {common_s:.1f} s only")
    return np.linspace(0.0, end_s or common_s, num_points + 1)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", type=Path, help="folder of the runs, called ARM-SEED")
    parser.add_argument("--start", type=Path, required=True, help="the policy that all runs started from, evaluated")
    parser.add_argument("--baselines", nargs="+", default=["ppo"], help="of several, the best one counts at every level")
    parser.add_argument("--arms", nargs="+", default=[], help="in this order; default: all")
    parser.add_argument("--seconds", type=float, default=0.0, help="compare so much time; default: what all runs have")
    parser.add_argument("--points", type=int, default=24, help="of the grid in time")
    parser.add_argument("--picture", type=Path, help="name without ending; default: comparison next to the runs")
    options = parser.parse_args(arguments)
    try:
        arms = read_arms(options.runs, options.start, options.arms)
        missing = sorted(set(options.baselines) - {arm.name for arm in arms})
        if missing:
            raise MissingData(f"--baselines: no run of {missing[0]!r} among {', '.join(arm.name for arm in arms)}")
        arms.sort(key=lambda arm: arm.name not in options.baselines)
        baselines = [arm for arm in arms if arm.name in options.baselines]
        found = compare(arms, baselines, grid_of(arms, options.seconds, options.points))
    except MissingData as error:
        print(f"compare: error: {error}", file=sys.stderr)
        return 2
    print(tables(found))
    folder = options.runs.parent
    (folder / "comparison.md").write_text(tables(found) + "\n")
    (folder / "comparison.json").write_text(json.dumps(_finite(asdict(found)), indent=2, allow_nan=False))
    draw(asdict(found), options.picture or folder / "comparison")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
