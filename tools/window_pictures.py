"""The pictures of docs/tppo_windows.md, drawn from the figures that ``window_ablation.py`` keeps."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from canvas import INK, LINE, MUTED, canvas, text
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from window_ablation import FIGURES, SLOTS, TAILS, TRAINING, WINDOWS

from megatron_rl.desk.report.charts import LIGHT

COLORS = dict(zip(SLOTS, ("blue", "green", "orange"), strict=True))
WIDTH, HEIGHT, LOWEST, HIGHEST = 330, 250, 0.5, 3.5
PAPER = 2.5
"""Largest speedup that T-PPO's paper reports (arXiv 2506.15050)."""


def gains() -> Figure:
    """Gain over the window, a panel per tail."""
    figure, axes = _sheet(
        "Finished responses a second, times those of synchronous PPO: by window and tail",
        "Simulated: 32B, budget 24k tokens, mean 4k in every panel; training takes half as long as generation in a synchronous step",
    )
    for corner, row in _panels(axes, [f"W = {name}" for name in WINDOWS]):
        for slots, color in COLORS.items():
            found = row[str(slots)]["0.5"]["apart"]
            _line(axes, corner, [found[name]["gain"] for name in WINDOWS], color)
        alone = row["64"]["0"]["apart"]
        _line(axes, corner, [alone[name]["gain"] for name in WINDOWS], "grey", dashed=True)
    _legend(axes, 660, "generation alone, 64 slots a server")
    return figure


def shares() -> Figure:
    """Best gain over the share of training, trained on windows and on whole responses."""
    figure, axes = _sheet(
        "The best window's gain: by what training takes of a synchronous step's generation",
        "Solid: the policy trains on windows. Dashed: on responses when they end (schedule.training_window_tokens: 0), no prefix twice",
    )
    for corner, row in _panels(axes, [f"{share:g}" for share in TRAINING]):
        for slots, color in COLORS.items():
            for place in ("apart", "whole responses"):
                best = [_best(row[str(slots)][f"{share:g}"][place]) for share in TRAINING]
                _line(axes, corner, best, color, dashed=place != "apart")
    _legend(axes, 660, "")
    return figure


def _sheet(title: str, says: str) -> tuple[Figure, Axes]:
    figure, axes = canvas(1060, 690)
    text(axes, (24, 28), title, size=12, bold=True)
    text(axes, (24, 48), says, size=9.5, color=MUTED)
    return figure, axes


def _panels(axes: Axes, names: Sequence[str]) -> Iterator[tuple[tuple[float, float], Mapping[str, Any]]]:
    """A panel per tail: its corner and its cells, by slots a server."""
    cells = json.loads(FIGURES.read_text())["cells"]
    for number, tail in enumerate(TAILS):
        corner = 56 + (number % 3) * (WIDTH + 4), 84 + (number // 3) * (HEIGHT + 34)
        _panel(axes, corner, tail, names)
        yield corner, cells[tail]


def _best(row: Mapping[str, Any]) -> float:
    return max(row[name]["gain"] for name in WINDOWS)


def _y(top: float, gain: float) -> float:
    return top + 20 + (HEIGHT - 60) * (1 - (min(gain, HIGHEST) - LOWEST) / (HIGHEST - LOWEST))


def _panel(axes: Axes, corner: tuple[float, float], title: str, names: Sequence[str]) -> None:
    left, top = corner
    text(axes, (left, top + 4), title, bold=True, size=10)
    for gain in (1.0, 2.0, PAPER, 3.0):
        style = ":" if gain == PAPER else "-"
        color = INK if gain in (1.0, PAPER) else LINE
        axes.plot([left, left + WIDTH - 60], [_y(top, gain)] * 2, color=color, linewidth=0.9, linestyle=style)
        text(axes, (left - 8, _y(top, gain)), f"{gain:g}", size=8, color=MUTED, ha="right")
    for place, name in enumerate(names):
        text(axes, (_x(left, place, len(names)), _y(top, LOWEST) + 12), name, size=8, color=MUTED, ha="center")


def _x(left: float, place: int, count: int) -> float:
    return left + 20 + (WIDTH - 100) * place / (count - 1)


def _line(
    axes: Axes, corner: tuple[float, float], values: Sequence[float], color: str, *, dashed: bool = False
) -> None:
    left, top = corner
    axes.plot(
        [_x(left, place, len(values)) for place in range(len(values))],
        [_y(top, value) for value in values],
        color=LIGHT[color],
        linewidth=1.4,
        linestyle=(0, (4, 2)) if dashed else "-",
        marker="o",
        markersize=3.5,
    )


def _legend(axes: Axes, y: float, dashed: str) -> None:
    x = 56.0
    for slots, color in COLORS.items():
        axes.plot([x, x + 24], [y, y], color=LIGHT[color], linewidth=1.6)
        text(axes, (x + 32, y), f"{slots} slots a server", size=9, color=MUTED)
        x += 160
    if dashed:
        axes.plot([x, x + 24], [y, y], color=LIGHT["grey"], linewidth=1.6, linestyle=(0, (4, 2)))
        text(axes, (x + 32, y), dashed, size=9, color=MUTED)
        x += 270
    axes.plot([x, x + 24], [y, y], color=INK, linewidth=0.9, linestyle=":")
    text(axes, (x + 32, y), "2.5, as the paper reports", size=9, color=MUTED)
