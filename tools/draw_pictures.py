"""Draws the pictures of README and docs/architecture.md, from the code and from one recorded run.

    python tools/draw_pictures.py                                     # all pictures, into docs/pictures
    python tools/draw_pictures.py --record outputs/tppo outputs/ppo   # also record docs/pictures/timeline.json from two runs
    python tools/draw_pictures.py --curve outputs/arithmetic/tppo     # docs/quickstart.png, the curve of a run

A picture depends only on its data and the pinned matplotlib, so drawing it twice gives the same bytes; a test compares them.
SVG with letters as outlines on a light card: the same on every machine, readable on a light and on a dark page.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from canvas import CARD, INK, LINE, MUTED, arrow, as_png, as_svg, canvas, rectangle, text
from machine_pictures import placements, processes
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from window_pictures import gains, shares

from megatron_rl.config.schedule_facts import Facts
from megatron_rl.desk.report.charts import LIGHT
from megatron_rl.desk.report.health_checks import smooth, smoothing_span
from megatron_rl.desk.report.run_record import load_run
from megatron_rl.schedule.graph import Resource, Stage
from megatron_rl.schedule.table import make_graph, row_of
from megatron_rl.system.files.atomic_files import write_atomic
from megatron_rl.tracking.timeline import Span, overlap_intervals, overlap_seconds, read_timeline

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
RECORD = FOLDER / "timeline.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--png", action="store_true", help="write PNG instead of SVG, for viewing")
    parser.add_argument("--record", type=Path, nargs=2, metavar="RUN", help="output folders of a T-PPO and of a PPO run")
    parser.add_argument("--curve", type=Path, metavar="RUN", help="output folder of the run whose accuracy is drawn")
    arguments = parser.parse_args()
    if arguments.curve:
        write_atomic(ROOT / "docs" / "quickstart.png", as_png(curve(arguments.curve)))
    if arguments.record:
        write_atomic(RECORD, json.dumps(record(*arguments.record), indent=None) + "\n")
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        write_atomic(arguments.output / f"{name}.{'png' if arguments.png else 'svg'}", (as_png if arguments.png else as_svg)(draw()))


# 1. Slots and windows over four steps.

LENGTHS = (5, 13, 3, 29, 7, 10, 2, 21, 6, 4, 12, 8, 3, 9, 5, 15, 4, 6, 11, 2, 7, 14, 3, 8, 6, 10, 5, 4, 9, 3, 6, 8)
"""Response lengths in the order of the prompts: made up, one long among many short ones."""
NUM_SLOTS, WINDOW = 6, 8
PALETTE = ("blue", "orange", "green", "violet", "teal", "pink", "yellow", "sky")


@dataclass(frozen=True)
class Bar:
    slot: int
    response: int
    start: int
    length: int
    ends: bool


def windows_of_tppo(num_steps: int) -> list[Bar]:
    """Successive batching: unfinished responses keep their slot, new prompts take the others at the start of a step."""
    slots = [[number, LENGTHS[number]] for number in range(NUM_SLOTS)]
    started, bars = NUM_SLOTS, []
    for step in range(num_steps):
        for slot, (response, left) in enumerate(slots):
            length = min(left, WINDOW)
            bars.append(Bar(slot, response, step * WINDOW, length, left <= WINDOW))
            slots[slot][1] -= length
            if left <= WINDOW:
                slots[slot] = [started, LENGTHS[started]]
                started += 1
    return bars


def windows_of_ppo(until: int) -> tuple[list[Bar], list[int]]:
    """Full responses: a step lasts as long as its longest response. Also returns the times at which steps end."""
    bars, ends, start, first = [], [], 0, 0
    while start < until:
        batch = LENGTHS[first : first + NUM_SLOTS]
        bars += [Bar(slot, first + slot, start, length, True) for slot, length in enumerate(batch)]
        start, first = start + max(batch), first + NUM_SLOTS
        ends.append(start)
    return bars, ends


def windows() -> Figure:
    figure, axes = canvas(1060, 500)
    num_steps = 4
    tppo = windows_of_tppo(num_steps)
    ppo, ppo_ends = windows_of_ppo(num_steps * WINDOW)
    text(axes, (24, 28), "Why windows: the same slots, the same responses, the same time", size=12, bold=True)
    _slots(
        axes,
        60,
        "T-PPO: one window of tokens per step; unfinished responses continue in the next step",
        tppo,
        [WINDOW * (step + 1) for step in range(num_steps)],
    )
    _slots(axes, 270, "Synchronous PPO: a step lasts as long as its longest response", ppo, ppo_ends)
    rectangle(axes, (26, 468, 16, 12), fill=LIGHT["blue"], radius=2)
    text(axes, (50, 474), "tokens of a response, with its index", size=9, color=MUTED)
    axes.plot([340], [474], marker="o", color=INK, markersize=5)
    text(axes, (352, 474), "finished: it is scored and trains the critic", size=9, color=MUTED)
    rectangle(axes, (672, 468, 16, 12), fill="#ffffff", edge=LINE, hatch="////", radius=2)
    text(axes, (696, 474), "idle slot     (lengths are made up; training is not shown)", size=9, color=MUTED)
    return figure


def _slots(axes: Axes, top: int, title: str, bars: Sequence[Bar], ends: Sequence[int]) -> None:
    left, unit, height, total = 70, 29.5, 24, 4 * WINDOW
    idle = 1 - sum(min(bar.start + bar.length, total) - bar.start for bar in bars if bar.start < total) / (NUM_SLOTS * total)
    text(axes, (24, top), title, bold=True, size=10)
    text(axes, (left + total * unit, top), f"idle: {idle:.0%} of the slots' time", size=10, ha="right", bold=True)
    starts = [0, *[end for end in ends if end < total]]
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], total], strict=True)):
        x, width = left + start * unit, (end - start) * unit
        rectangle(axes, (x, top + 16, width, NUM_SLOTS * height + 4), fill="#ffffff", edge="none", hatch=None, radius=0)
        axes.add_patch(
            Rectangle((x, top + 18), width, NUM_SLOTS * height, facecolor="#ffffff", edgecolor=LINE, hatch="////", linewidth=0)
        )
        text(axes, (x + width / 2, top + NUM_SLOTS * height + 30), f"step {number + 1}", size=9, color=MUTED, ha="center")
    for slot in range(NUM_SLOTS):
        text(axes, (left - 10, top + 18 + height * (slot + 0.5)), f"slot {slot + 1}", size=8.5, color=MUTED, ha="right")
    firsts: set[int] = set()
    for bar in bars:
        length = min(bar.start + bar.length, total) - bar.start
        if length > 0:
            x, y = left + bar.start * unit, top + 20 + height * bar.slot
            rectangle(axes, (x + 1, y, length * unit - 2, height - 4), fill=LIGHT[PALETTE[bar.response % len(PALETTE)]], radius=2)
            if bar.response not in firsts:
                text(axes, (x + 9, y + height / 2 - 2), str(bar.response + 1), size=8.5, color="#ffffff", bold=True)
            firsts.add(bar.response)
            if bar.ends and bar.start + bar.length <= total:
                axes.plot([x + length * unit - 9], [y + height / 2 - 2], marker="o", color=INK, markersize=4.5)
    for start in [*starts, total]:
        axes.plot([left + start * unit] * 2, [top + 14, top + 22 + NUM_SLOTS * height], color=INK, linewidth=1.2)


# 2. The step graph, from the table of stages.

LANES = {
    Resource.rollout: ("SGLang servers", "blue"),
    Resource.trainer: ("Megatron ranks", "green"),
    Resource.host: ("driver's CPU", "grey"),
}
BOX_WIDTH, BOX_HEIGHT, COLUMN, ROW = 116, 38, 148, 84


def graph() -> Figure:
    stages = make_graph(Facts())
    figure, axes = canvas(1180, 500)
    text(axes, (24, 28), "The stages of a T-PPO step, drawn from the table in schedule/table.py", size=12, bold=True)
    text(
        axes,
        (24, 48),
        "An arrow: needs a product of the same step (implied arrows are omitted). "
        "Orange: needs a product of the previous step.",
        size=9.5,
        color=MUTED,
    )
    places = _places(axes, stages)
    makers = {product: stage.name for stage in stages for product in stage.products}
    needs = {stage.name: {makers[product] for product in stage.needs.split()} for stage in stages}
    for stage in stages:
        x, y = places[stage.name]
        for other in sorted(_direct(needs, stage.name)):
            from_x, from_y = places[other]
            start, end = (from_x + BOX_WIDTH, from_y + BOX_HEIGHT / 2), (x, y + BOX_HEIGHT / 2)
            arrow(axes, start, end, color="muted", curved=from_y != y)
    for stage in stages:
        x, y = places[stage.name]
        rectangle(axes, (x, y, BOX_WIDTH, BOX_HEIGHT), fill="#ffffff", edge=LIGHT[LANES[stage.resource][1]], line=1.6)
        text(axes, (x + BOX_WIDTH / 2, y + BOX_HEIGHT / 2), stage.name, bold=True, ha="center", size=9.5)
        before = " + ".join(stage.needs_before.split())
        if before:
            text(axes, (x + BOX_WIDTH / 2, y - 9), before, size=8, color=LIGHT["orange"], ha="center")
    text(
        axes,
        (24, 478),
        "Generation does not need the previous step's critic: the next window is generated while the critic trains.",
        size=9.5,
        color=LIGHT["pink"],
        bold=True,
    )
    return figure


def _places(axes: Axes, stages: Sequence[Stage]) -> dict[str, tuple[float, float]]:
    """Top left corners: a column per depth in the graph, a band per resource. Draws the bands."""
    makers = {product: stage for stage in stages for product in stage.products}

    def depth(stage: Stage) -> int:
        return max((depth(makers[product]) + 1 for product in stage.needs.split()), default=0)

    places, top = {}, 74
    for resource, (name, color) in LANES.items():
        taken: dict[int, int] = {}
        members = [stage for stage in stages if stage.resource is resource]
        for stage in members:
            taken[depth(stage)] = taken.get(depth(stage), 0) + 1
            places[stage.name] = (132 + COLUMN * depth(stage), top + 30 + ROW * (taken[depth(stage)] - 1))
        height = ROW * max(taken.values()) + 8
        rectangle(axes, (18, top, 1144, height), fill=LIGHT[color] + "14")
        text(axes, (30, top + height / 2), name.replace(" ", "\n"), color=LIGHT[color], bold=True, size=9.5)
        top += height + 10
    return places


def _direct(needs: dict[str, set[str]], name: str) -> set[str]:
    """Stages that ``name`` needs and that none of its other needs implies."""

    def ancestors(of: str) -> set[str]:
        return needs[of].union(*map(ancestors, needs[of]))

    return needs[name] - set().union(*map(ancestors, needs[name]))


# 3. A timeline, as it was.


def record(*folders: Path, num_steps: int = 4) -> dict[str, list[list]]:
    """The newest steps in a row without an evaluation: from the start of a generation to that of the one after them, [s]."""
    runs = {}
    for name, folder in zip(("tppo", "ppo"), folders, strict=True):
        spans = read_timeline(folder / "timeline.json")
        starts_s = {span.step: span.start_s for span in spans if span.name == "generate"}
        evaluated = {span.step for span in spans if span.name == "evaluate" and span.end_s - span.start_s > 0.1}
        first = max(starts_s) - num_steps
        while evaluated & set(range(first - 1, first + num_steps)):
            first -= 1
        begin_s, end_s = starts_s[first], starts_s[first + num_steps]
        runs[name] = [
            [
                span.name,
                span.lane,
                span.step,
                *(round(min(max(at, begin_s), end_s) - begin_s, 3) for at in (span.start_s, span.end_s)),
            ]
            for span in spans
            if begin_s < span.end_s and span.start_s < end_s and span.name not in ("checkpoint", "record", "evaluate")
        ]
    return runs


def timeline() -> Figure:
    runs = json.loads(RECORD.read_text())
    figure, axes = canvas(1060, 384)
    text(
        axes,
        (24, 28),
        "Four steps of T-PPO and of synchronous PPO, recorded (examples/arithmetic on two shared CPU cores)",
        size=12,
        bold=True,
    )
    spans = {name: [Span(*row[:2], *row[3:], step=row[2]) for row in rows] for name, rows in runs.items()}
    length_s = max(span.end_s for rows in spans.values() for span in rows)
    _recorded(axes, 60, "T-PPO: the critic trains while the next window is generated", spans["tppo"], length_s)
    _recorded(axes, 198, "PPO: every stage waits for the previous stage", spans["ppo"], length_s)
    shown = ("generate", "score", "old_logprobs", "values", "advantages", "update_policy", "publish", "update_critic")
    x = 110.0
    for name in shown:
        rectangle(axes, (x, 354, 12, 12), fill=LIGHT[row_of(name).color], radius=2)
        text(axes, (x + 18, 360), name, size=9, color=MUTED)
        x += 46 + 7.2 * len(name)
    return figure


def _recorded(axes: Axes, top: float, title: str, spans: Sequence[Span], length_s: float) -> None:
    left, width = 110.0, 926.0
    scale = width / length_s
    hidden_s, critic_s = (overlap_seconds(spans, name, "update_critic") for name in ("generate", "update_critic"))
    text(axes, (24, top), title, bold=True, size=10)
    text(
        axes,
        (left + width, top),
        f"critic update hidden behind generation: {hidden_s / critic_s:.0%}",
        size=10,
        ha="right",
        bold=True,
    )
    for start_s, end_s in overlap_intervals(spans, "generate", "update_critic"):
        rectangle(axes, (left + start_s * scale, top + 14, (end_s - start_s) * scale, 98), fill=LIGHT["pink"] + "2a", radius=0)
    for row, lane in enumerate(("rollout", "trainer", "host")):
        y = top + 20 + 31 * row
        text(axes, (left - 10, y + 13), lane, ha="right", size=9.5)
        axes.plot([left, left + width], [y + 28.5] * 2, color=LINE, linewidth=0.7)
        for span in spans:
            if span.lane == lane:
                x, length = left + span.start_s * scale, max((span.end_s - span.start_s) * scale, 1.0)
                color = LIGHT[row_of(span.name).color]
                axes.add_patch(Rectangle((x, y), length, 26, facecolor=color, edgecolor=CARD, linewidth=0.6))
                if length > 60:
                    text(
                        axes,
                        (x + length / 2, y + 13),
                        f"{span.name.replace('update_', '')} {span.step}",
                        size=8.5,
                        color="#ffffff",
                        ha="center",
                    )
    for second in range(int(length_s) + 1):
        text(axes, (left + second * scale, top + 120), f"{second} s", size=8, color=MUTED, ha="center")


def curve(folder: Path) -> Figure:
    """Accuracy of a run over steps and over training time. Not among PICTURES: it takes all metrics of a run."""
    run = load_run(folder)
    training, evaluation = run.values("reward/accuracy") * 100, run.values("eval/accuracy") * 100
    known, evaluated = np.isfinite(training), np.isfinite(evaluation)
    figure = Figure(figsize=(11.4, 4.2), layout="constrained")
    for place, (x, label) in enumerate([(run.steps, "training step"), (run.hours() * 60, "training time (minutes)")]):
        axes = figure.add_subplot(1, 2, place + 1)
        axes.plot(x[known], training[known], color=LIGHT["blue"], linewidth=0.8, alpha=0.3)
        smoothed = smooth(training[known], smoothing_span(len(run.steps)))
        axes.plot(x[known], smoothed, color=LIGHT["blue"], linewidth=1.8, label="training, smoothed")
        axes.plot(x[evaluated], evaluation[evaluated], color=LIGHT["orange"], marker="o", markersize=4.5, label="evaluation")
        axes.set(xlabel=label, ylabel="% correct" if place == 0 else "")
        axes.set_ylim(0, None)
        axes.grid(axis="y", color=LINE, linewidth=0.6)
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.axes[0].legend(frameon=False)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "timeline": timeline,
    "windows": windows,
    "step_graph": graph,
    "processes": processes,
    "placements": placements,
    "tppo_windows": gains,
    "tppo_training": shares,
}

if __name__ == "__main__":
    main()
