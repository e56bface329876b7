"""Draws a comparison: accuracy over seconds of training with intervals, finished responses per second, and README's headline.

    python examples/long_tail/comparison_picture.py     # both published pictures again, from comparison.json
"""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from megatron_rl.desk.report.charts import COLORS, LIGHT

DARK = {name: dark for name, (_, dark) in COLORS.items()}
_ARM_COLORS = ("orange", "blue", "teal", "violet", "green", "pink", "yellow", "sky", "red")
"""Names of LIGHT and DARK: the baseline's, then those of the other arms."""
_LEAST_GAP = 0.052
"""Between the names at the ends of two lines, in heights of the panel."""

Number = Mapping[str, Any]
"""An Estimate: value, low, high, relation."""

PUBLISHED = Path(__file__).resolve().with_name("comparison.json")
"""The comparison that README and docs/benchmarks.md quote, as compare.py wrote it."""
HEADLINE = {"ppo": "PPO", "ppo-32": "PPO, 2 x updates", "tppo-384": "T-PPO, windows", "whole-96": "T-PPO, responses"}
"""Arms of the headline and their labels, each at its line."""


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write ``path``.svg for light pages, ``path``-dark.svg and ``path``.png. ``found``: a Comparison as a dictionary."""
    for name, drawn in svgs(found, _figure, path.name).items():
        path.with_name(name).write_text(drawn)
    figure = _figure(found, LIGHT)
    figure.set_facecolor("white")
    FigureCanvasAgg(figure)
    figure.savefig(path.with_name(f"{path.name}.png"), dpi=150)


def svgs(found: Mapping[str, Any], figure: Callable[..., Figure], name: str) -> dict[str, str]:
    """Contents of the two files of a picture, for light and for dark pages, by file name."""
    return {f"{name}.svg": _svg(figure(found, LIGHT)), f"{name}-dark.svg": _svg(figure(found, DARK))}


def published() -> dict[str, str]:
    """Contents of the published pictures, by file name in this folder."""
    found = json.loads(PUBLISHED.read_text())
    return {**svgs(found, _figure, "comparison"), **svgs(found, _headline, "headline")}


def _headline(found: Mapping[str, Any], palette: Mapping[str, str]) -> Figure:
    """Accuracy over time of the arms in HEADLINE, in letters that a phone's width still shows."""
    figure = Figure(figsize=(6.4, 4.2), facecolor="none")
    axes = figure.add_axes((0.085, 0.095, 0.585, 0.72))
    colors = {name: palette[color] for name, color in zip(HEADLINE, ("orange", "pink", "blue", "green"), strict=True)}
    shown = {name: found["accuracy"][name] for name in HEADLINE}
    _curves(axes, found["grid"], shown, colors, palette, size=13)
    heights = _spread(axes, {name: curve[-1]["value"] for name, curve in shown.items()}, 0.18, top_label=0.92)
    for name, height in heights.items():
        times = found["times_finished"].get(name)
        label = HEADLINE[name] + (f"\n{times['value']:.2f} x finished/s" if times else "")
        _label(axes, label, height, colors[name], 13)
    seeds = min(found["num_seeds"][name] for name in HEADLINE)
    _title(axes, "Accuracy over seconds of training", f"two CPU cores; mean and 95 % interval, {seeds} seeds", palette, 15)
    return figure


def _figure(found: Mapping[str, Any], palette: Mapping[str, str]) -> Figure:
    figure = Figure(figsize=(10.0, 4.6), facecolor="none")
    left = figure.add_axes((0.065, 0.12, 0.475, 0.75))
    above, below = figure.add_axes((0.745, 0.565, 0.225, 0.305)), figure.add_axes((0.745, 0.045, 0.225, 0.305))
    arms = list(found["accuracy"])
    colors = {name: palette[_ARM_COLORS[i % len(_ARM_COLORS)]] for i, name in enumerate(arms)}
    _accuracy(left, found, colors, palette)
    baselines, most = found["baselines"], max(found["num_seeds"].values())
    baseline = baselines[0] if len(baselines) == 1 else "the best baseline"
    finished = {name: speed["finished_per_s"] for name, speed in found["speed"].items()}
    times = {name: f"   {one['value']:.2f} x" for name, one in found["times_finished"].items()}
    _bars(above, finished, times, colors, palette)
    middle = len(found["levels"]) // 2
    faster = {name: times[middle] for name, times in found["times_faster"].items()}
    _bars(below, faster, dict.fromkeys(arms, " x"), colors, palette)
    words = f"mean and 95 % interval over {most} seeds" if most > 1 else "one seed"
    _title(left, "accuracy on held-out problems", f"over seconds of training; {words}", palette)
    _title(above, "finished a second", f"responses; times {baseline}", palette)
    _title(below, f"times faster to {found['levels'][middle]:.1%}", f"than {baseline}", palette)
    return figure


def _accuracy(axes: Axes, found: Mapping[str, Any], colors: Mapping[str, str], palette: Mapping[str, str]) -> None:
    _curves(axes, found["grid"], found["accuracy"], colors, palette, size=9.5)
    axes.set_xlabel("seconds", color=palette["muted"], fontsize=9.5, loc="right", labelpad=2)
    ends = {name: numbers[-1]["value"] for name, numbers in found["accuracy"].items()}
    for name, height in _spread(axes, ends, _LEAST_GAP).items():
        _label(axes, name, height, colors[name], 9.5)


def _curves(
    axes: Axes,
    seconds: Sequence[float],
    accuracy: Mapping[str, Sequence[Number]],
    colors: Mapping[str, str],
    palette: Mapping[str, str],
    *,
    size: float,
) -> None:
    """Accuracy of each arm over time, with its interval as a band."""
    _plain(axes, palette)
    axes.grid(axis="y", color=palette["line"], linewidth=0.6)
    grid, tops = np.array(seconds), []
    for name, numbers in accuracy.items():
        values, low, high = (np.array([one[key] for one in numbers]) for key in ("value", "low", "high"))
        tops += [values.max(), *(high[np.isfinite(high)])]
        if np.isfinite(low).all():
            axes.fill_between(grid, low, high, color=colors[name], alpha=0.16, linewidth=0)
        axes.plot(grid, values, color=colors[name], linewidth=2.0, solid_capstyle="round")
    bottom = min(one["value"] for numbers in accuracy.values() for one in numbers)
    margin = 0.06 * (max(tops) - bottom) or 0.01
    axes.set_ylim(max(0.0, bottom - margin), min(1.0, max(tops) + margin))
    axes.set_xlim(0, grid[-1])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.tick_params(labelsize=size)


def _label(axes: Axes, words: str, height: float, color: str, size: float) -> None:
    """Write to the right of the panel, at a share of its height."""
    axes.annotate(
        words,
        (1.0, height),
        xycoords="axes fraction",
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=size,
        color=color,
        annotation_clip=False,
    )


def _spread(axes: Axes, ends: Mapping[str, float], gap: float, top_label: float = 1.0) -> dict[str, float]:
    """Heights, in shares of the panel, at which the names at the lines' ends do not touch."""
    bottom, top = axes.get_ylim()
    names = sorted(ends, key=lambda name: ends[name])
    heights = [(ends[name] - bottom) / (top - bottom) for name in names]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    over = heights[-1] - top_label
    for i in range(len(heights) - 1, -1, -1):
        highest = top_label if i == len(heights) - 1 else heights[i + 1] - gap
        heights[i] = min(heights[i], highest) if over > 0 else heights[i]
    return dict(zip(names, heights, strict=True))


def _bars(
    axes: Axes,
    numbers: Mapping[str, Number],
    further: Mapping[str, str],
    colors: Mapping[str, str],
    palette: Mapping[str, str],
) -> None:
    """A bar with its interval for each arm; ``further`` words stand behind its number."""
    _plain(axes, palette)
    for row, (name, one) in enumerate(numbers.items()):
        axes.barh(row, one["value"], height=0.62, color=colors[name], linewidth=0)
        end = one["value"]
        if np.isfinite([one["low"], one["high"]]).all():
            axes.plot([one["low"], one["high"]], [row, row], color=palette["ink"], linewidth=1.1, solid_capstyle="butt")
            end = max(end, one["high"])
        axes.annotate(
            f"{one['relation']}{one['value']:.{1 if one['value'] >= 10 else 2}f}" + further.get(name, ""),
            (end, row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
            color=palette["ink"],
        )
    axes.set_yticks(range(len(numbers)), list(numbers))
    axes.tick_params(axis="y", labelcolor=palette["ink"], labelsize=9.5)
    axes.set_ylim(max(len(numbers), 3) - 0.5, -0.5)
    ends = [one["high"] if np.isfinite(one["high"]) else one["value"] for one in numbers.values()]
    axes.set_xlim(0, 1.75 * max(ends))  # room for the words behind the longest
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.spines["left"].set_visible(True)
    axes.spines["left"].set_color(palette["line"])


def _plain(axes: Axes, palette: Mapping[str, str]) -> None:
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(palette["line"])
    axes.set_axisbelow(True)
    axes.tick_params(colors=palette["muted"], labelsize=9.5, length=0, pad=5)


def _title(axes: Axes, title: str, below: str, palette: Mapping[str, str], size: float = 11.5) -> None:
    corner = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
    small = 0.826 * size
    axes.annotate(title, (0, 1), xytext=(0, 2.26 * size), fontsize=size, weight="bold", color=palette["ink"], **corner)
    axes.annotate(below, (0, 1), xytext=(0, 0.96 * size), fontsize=small, color=palette["muted"], **corner)


def _svg(figure: Figure) -> str:
    FigureCanvasSVG(figure)
    stream = io.StringIO()
    # Ids are hashes with this salt: without one they differ from run to run.
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "megatron_rl"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None}, facecolor="none")
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


if __name__ == "__main__":
    for file, content in published().items():
        PUBLISHED.with_name(file).write_text(content)
