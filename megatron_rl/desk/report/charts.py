"""Draws the report's charts as inline SVG with matplotlib, without pyplot; the page colors them.

Colors are drawn as fixed hex values and then replaced by CSS variables of the same name, so that one picture
follows the reader's light or dark theme. Text stays text (searchable, in the page's font). Figures are plain
objects: any thread or process may draw. matplotlib's settings are global, so drawing takes a lock while they are
changed.
"""

import io
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from megatron_rl.schedule.table import row_of
from megatron_rl.tracking.timeline import Span, assign_tracks, overlap_intervals

COLORS = {
    "ink": ("#23272b", "#e4e6e8"),
    "muted": ("#646b73", "#9aa1a8"),
    "line": ("#d9dcdf", "#3a3f45"),
    "paper": ("#fefefe", "#1c1f23"),
    "blue": ("#2f67ab", "#78a8e8"),
    "orange": ("#c26a22", "#e09a5e"),
    "green": ("#3a8757", "#72bb8d"),
    "red": ("#b8423a", "#e6827b"),
    "violet": ("#7858a5", "#b29bdf"),
    "teal": ("#28858f", "#62bcc7"),
    "pink": ("#b05087", "#dd91bb"),
    "yellow": ("#a98a22", "#d2b65c"),
    "sky": ("#6fa0d8", "#4d80c0"),
    "indigo": ("#4d55a8", "#9ba2ee"),
    "brown": ("#8a5f44", "#c79b7c"),
    "olive": ("#707a2e", "#b3bd68"),
    "purple": ("#8b4fb0", "#c596e4"),
    "sand": ("#b39a72", "#cdb58d"),
    "slate": ("#56626e", "#a3b0bd"),
    "grey": ("#858c93", "#8f979f"),
}
"""Maps a color name to its values in the light and the dark theme."""
LIGHT = {name: light for name, (light, _) in COLORS.items()}
_LONG_TAIL = 8
"""Ratio of maximum to median from which a histogram's axis is logarithmic."""
_MAX_POINTS = 400
"""A line with more points is reduced to the extremes of equal intervals: spikes survive, the file stays small."""

_settings_lock = threading.Lock()


@dataclass(frozen=True)
class Series:
    """A line of a chart."""

    label: str
    color: str
    """A color name of ``LIGHT``."""
    steps: np.ndarray
    """[N] x positions."""
    values: np.ndarray
    """[N] y positions, NaN if a step has none."""
    style: str = "line"
    """line, faint (raw values behind a smoothed line) or points."""
    spread: np.ndarray | None = None
    """[N] half height of a band around the line, such as a standard deviation."""


def _reduce_points(steps: np.ndarray, values: np.ndarray, max_points: int = _MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most ``max_points`` finite points in order: the smallest and the largest of each interval of equal size."""
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if len(values) <= max_points:
        return steps, values
    chosen: set[int] = set()
    for interval in np.array_split(np.arange(len(values)), max_points // 2):
        chosen.add(int(interval[np.argmin(values[interval])]))
        chosen.add(int(interval[np.argmax(values[interval])]))
    order = np.array(sorted(chosen))
    return steps[order], values[order]


_PANEL = (370, 210)
"""Size of a panel's chart: its letters of 10 pixels stay legible in a third of the page, and on a phone."""


def _new_figure(width: float, height: float) -> Figure:
    """An empty figure of ``width`` x ``height`` CSS pixels."""
    layout = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02)
    return Figure(figsize=(width / 72, height / 72), layout=layout, facecolor="none")


def _new_axes(figure: Figure) -> Axes:
    """Axes in the report's style."""
    axes = figure.add_subplot()
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LIGHT["line"])
    axes.grid(axis="y", color=LIGHT["line"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=LIGHT["muted"], labelsize=10, length=0, pad=4)
    axes.tick_params(which="minor", length=0, labelsize=0)
    return axes


def _label_axes(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label, color=LIGHT["muted"], fontsize=10, loc="right")
    axes.set_ylabel(y_label, color=LIGHT["muted"], fontsize=10)


def _draw_series(axes: Axes, series: Sequence[Series]) -> None:
    """Draw lines, bands and points. A single value is drawn as a point: its line would be invisible."""
    for one in series:
        color = LIGHT[one.color]
        if one.spread is not None:
            low, high = one.values - one.spread, one.values + one.spread
            shown = np.isfinite(low) & np.isfinite(high)
            every = max(1, int(shown.sum()) // _MAX_POINTS)
            band = (one.steps[shown][::every], low[shown][::every], high[shown][::every])
            axes.fill_between(*band, color=color, alpha=0.15, linewidth=0)
        steps, values = _reduce_points(one.steps, one.values)
        if one.style == "points" or len(values) == 1:
            axes.plot(steps, values, color=color, linewidth=1.0, marker="o", markersize=4.5)
        elif one.style == "faint":
            axes.plot(steps, values, color=color, linewidth=0.9, alpha=0.35)
        else:
            axes.plot(steps, values, color=color, linewidth=1.7)


def line_chart(
    series: Sequence[Series],
    y_label: str,
    *,
    log: bool = False,
    y_range: tuple[float | None, float | None] = (None, None),
    references: Sequence[tuple[float, str]] = (),
    x_label: str = "training step",
) -> str:
    """Lines over training steps as SVG text. ``references``: dashed horizontal lines as (value, label)."""
    figure = _new_figure(*_PANEL)
    axes = _new_axes(figure)
    _draw_series(axes, series)
    if log:
        _make_logarithmic(axes)
    for value, label in references:
        axes.axhline(value, color=LIGHT["muted"], linewidth=1.0, dashes=(4, 3))
        transform = axes.get_yaxis_transform()
        axes.annotate(label, (1.0, value), xycoords=transform, xytext=(0, 3), textcoords="offset points", ha="right",
                      va="bottom", fontsize=9.5, color=LIGHT["muted"], path_effects=[withStroke(linewidth=3, foreground=LIGHT["paper"])])
    axes.set_ylim(*y_range)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=x_label == "training step"))
    if not log:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    _label_axes(axes, x_label, y_label)
    return _to_svg(figure)


def _make_logarithmic(axes: Axes) -> None:
    """Logarithmic y axis. Powers of ten alone would leave a range of less than two decades with one label or none."""
    low, high = axes.dataLim.intervaly
    axes.set_yscale("log")
    decades = float(np.log10(high / low)) if 0 < low < high < np.inf else 0.0
    ticks = LogLocator(subs=(1.0, 2.0, 5.0) if decades < 3 else (1.0,), numticks=8)
    axes.yaxis.set_major_locator(ticks if decades > 1 else MaxNLocator(nbins=4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.minorticks_off()


def stage_chart(steps: np.ndarray, stages: Mapping[str, np.ndarray], step_seconds: np.ndarray) -> str:
    """Seconds of the stages, stacked, and the length of the step as a line; SVG text. All arrays [N]; NaN counts as 0 s."""
    # More than 200 bars would be too thin to see.
    bins = np.array_split(np.arange(len(steps)), min(len(steps), 200))
    centers = np.array([steps[bin].mean() for bin in bins])
    if len(centers) > 1:
        middles = (centers[1:] + centers[:-1]) / 2
        edges = np.concatenate([[2 * centers[0] - middles[0]], middles, [2 * centers[-1] - middles[-1]]])
    else:
        edges = np.array([centers[0] - 0.5, centers[0] + 0.5])
    figure = _new_figure(900, 260)
    axes = _new_axes(figure)
    base = np.zeros(len(bins))
    for stage, seconds in stages.items():
        filled = np.nan_to_num(seconds)
        top = base + np.array([filled[bin].mean() for bin in bins])
        axes.stairs(top, edges, baseline=base, fill=True, color=_stage_color(stage), linewidth=0, alpha=0.85)
        base = top
    known = [bin[np.isfinite(step_seconds[bin])] for bin in bins]
    lengths = np.array([step_seconds[bin].mean() if len(bin) else np.nan for bin in known])
    axes.stairs(lengths, edges, baseline=None, color=LIGHT["ink"], linewidth=1.3)
    # A slow first step (servers warming up) must not flatten all other steps.
    usual = float(np.percentile(base, 95)) * 1.35
    axes.set_ylim(0, min(max(float(base.max()) * 1.05, 1e-9), max(usual, 1e-9)))
    axes.set_xlim(edges[0], edges[-1])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    _label_axes(axes, "training step", "seconds")
    return _to_svg(figure)


def _stage_color(stage: str) -> str:
    return LIGHT[row_of(stage).color]


def timeline_chart(spans: Sequence[Span], lanes: Sequence[str], overlap_of: tuple[str, str]) -> str:
    """Spans on their lanes over seconds; intervals in which both stages of ``overlap_of`` run are shaded."""
    origin_s = min(span.start_s for span in spans)
    end_s = max(span.end_s for span in spans)
    seconds_per_pixel = (end_s - origin_s) / 900 or 1.0
    rows: list[tuple[str, list[Span]]] = []
    for lane in lanes:
        lane_spans = [span for span in spans if span.lane == lane]
        tracks = assign_tracks(lane_spans)
        for number in range(max(tracks, default=-1) + 1):
            members = [span for span, track in zip(lane_spans, tracks, strict=True) if track == number]
            rows.append((lane if number == 0 else "", members))
    figure = _new_figure(1000, 62 + 34 * len(rows))
    axes = _new_axes(figure)
    for start_s, stop_s in overlap_intervals(spans, *overlap_of):
        axes.axvspan(start_s - origin_s, stop_s - origin_s, color=LIGHT["pink"], alpha=0.13, linewidth=0)
    for row, (_, members) in enumerate(rows):
        for span in members:
            length_s = span.end_s - span.start_s
            axes.barh(row, max(length_s, seconds_per_pixel), left=span.start_s - origin_s, height=0.72,
                      color=_stage_color(span.name), edgecolor=LIGHT["paper"], linewidth=0.8)
            label = f"{span.name} {span.step}"
            # Draw the label only if it fits, at about 6.2 pixels per character.
            if length_s > 6.2 * len(label) * seconds_per_pixel:
                axes.text((span.start_s + span.end_s) / 2 - origin_s, row, label, ha="center", va="center",
                          fontsize=10, color=LIGHT["paper"], clip_on=True)
    axes.set_xlim(0, end_s - origin_s or 1.0)
    return _rows_to_svg(figure, axes, [name for name, _ in rows], "seconds")


def _rows_to_svg(figure: Figure, axes: Axes, rows: Sequence[str], x_label: str) -> str:
    """Name the rows of horizontal bars, from top to bottom, and draw the figure."""
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(axis="y", labelcolor=LIGHT["ink"], labelsize=11)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=LIGHT["line"], linewidth=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10))
    _label_axes(axes, x_label, "")
    return _to_svg(figure)


def histogram_chart(groups: Sequence[tuple[str, np.ndarray]], x_label: str, *, limit: float = 0.0) -> str:
    """Histogram as SVG text: percentage of values per bin, one line per group (color name, [N] values). ``limit``: x of a dashed line."""
    figure = _new_figure(*_PANEL)
    axes = _new_axes(figure)
    highest = max([limit, *(float(values.max()) for _, values in groups)])
    typical = float(np.median(np.concatenate([values for _, values in groups])))
    # On a linear axis a long tail would squeeze all other values into one bin.
    log = typical > 0 and highest > _LONG_TAIL * typical
    edges = np.geomspace(1.0, highest, 33) if log else np.linspace(0, highest or 1.0, 33)
    for color, values in groups:
        counts, _ = np.histogram(values, edges)
        shares = 100.0 * counts / max(1, len(values))
        axes.stairs(shares, edges, color=LIGHT[color], linewidth=1.7)
        axes.stairs(shares, edges, color=LIGHT[color], fill=True, alpha=0.12, linewidth=0)
    if limit:
        axes.axvline(limit, color=LIGHT["muted"], linewidth=1.0, dashes=(4, 3))
    axes.set_ylim(0, None)
    if log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        axes.set_xlim(edges[0], 1.1 * highest)
    else:
        axes.set_xlim(0, 1.02 * (highest or 1.0))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    _label_axes(axes, x_label, "% of responses")
    return _to_svg(figure)


def bar_chart(rows: Sequence[str], groups: Sequence[tuple[str, Sequence[float]]], x_label: str) -> str:
    """Horizontal bars as SVG text. ``rows``: labels from top to bottom. ``groups``: (color name, [rows] values), one bar per row each."""
    figure = _new_figure(900, 46 + len(rows) * (10 + 13 * len(groups)))
    axes = _new_axes(figure)
    height = 0.8 / len(groups)
    for number, (color, values) in enumerate(groups):
        positions = np.arange(len(rows)) - 0.4 + height * (number + 0.5)
        axes.barh(positions, np.nan_to_num(values), height=0.88 * height, color=LIGHT[color], linewidth=0)
    return _rows_to_svg(figure, axes, rows, x_label)


def rank_chart(stages: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> str:
    """Seconds by rank, points of one color per stage of ([N] ranks, [N] seconds). Lines would suggest values between ranks."""
    figure = _new_figure(900, 240)
    axes = _new_axes(figure)
    for stage, (ranks, seconds) in stages.items():
        axes.plot(ranks, seconds, color=_stage_color(stage), linewidth=0, marker="o", markersize=5.0)
    axes.set_ylim(0, None)
    last = int(max(ranks.max() for ranks, _ in stages.values()))
    axes.set_xlim(-0.5, last + 0.5)
    axes.set_xticks(range(0, last + 1, 1 + last // 16))
    _label_axes(axes, "trainer rank", "seconds per step")
    return _to_svg(figure)


def _to_svg(figure: Figure) -> str:
    """The figure as an <svg> element without ids, fixed size or fonts, with CSS variables as colors."""
    FigureCanvasSVG(figure)
    stream = io.StringIO()
    with _settings_lock, matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(stream, format="svg", metadata={"Date": None}, facecolor="none")
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Ids would repeat in every picture; ids that are referenced (clip paths, markers) are hashes and stay.
    text = re.sub(r' id="[a-z0-9.]+_[0-9]+"', "", text)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = re.sub(r'^<svg([^>]*?) height="[^"]*"', r"<svg\1", text)
    text = re.sub(r'^<svg([^>]*?) width="[^"]*"', r'<svg\1 role="img"', text)
    for name, color in LIGHT.items():
        text = text.replace(color, f"var(--{name})")
    return re.sub(r"\s*\n\s*", "\n", text)
