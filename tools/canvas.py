"""A canvas measured in pixels from its top left corner, and what ``draw_pictures.py`` draws on it."""

import io

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path

from megatron_rl.desk.report.charts import LIGHT

INK, MUTED, LINE = LIGHT["ink"], LIGHT["muted"], LIGHT["line"]
CARD = "#fbfbfa"

Point = tuple[float, float]
Area = tuple[float, float, float, float]
"""x, y, width, height in pixels; y grows downwards."""


def canvas(width: int, height: int) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width / 100, height / 100), dpi=100, facecolor="none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    rectangle(axes, (2, 2, width - 4, height - 4), fill=CARD, edge=LINE, radius=10)
    return figure, axes


def rectangle(
    axes: Axes,
    area: Area,
    *,
    fill: str,
    edge: str = "none",
    radius: float = 4.0,
    line: float = 1.0,
    dashed: bool = False,
    hatch: str | None = None,
) -> None:
    x, y, width, height = area
    style = f"round,pad=0,rounding_size={radius}"
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle=style,
            facecolor=fill,
            edgecolor=edge,
            linewidth=line,
            linestyle=(0, (4, 3)) if dashed else "-",
            hatch=hatch,
            mutation_aspect=1,
        )
    )


def text(
    axes: Axes,
    at: Point,
    words: str,
    *,
    size: float = 9.5,
    color: str = INK,
    bold: bool = False,
    ha: str = "left",
    va: str = "center",
) -> None:
    axes.text(*at, words, fontsize=size, color=color, weight="bold" if bold else "normal", ha=ha, va=va, linespacing=1.35)


def box(axes: Axes, area: Area, title: str, says: str = "", *, color: str = "grey") -> None:
    """A box with a coloured edge, a title and lines of small text."""
    x, y, width, height = area
    rectangle(axes, area, fill="#ffffff", edge=LIGHT[color], line=1.3)
    if not says:
        text(axes, (x + width / 2, y + height / 2), title, ha="center", bold=True, size=9.5)
        return
    text(axes, (x + 10, y + 14), title, bold=True, size=9.5)
    text(axes, (x + 10, y + 27), says, color=MUTED, size=8.5, va="top")


def arrow(
    axes: Axes,
    start: Point,
    end: Point,
    words: str = "",
    *,
    color: str = "ink",
    both: bool = False,
    curved: bool = False,
    at: Point | None = None,
) -> None:
    """Draw an arrow; a ``curved`` one starts and ends horizontally. ``words`` are above its middle, or at ``at``."""
    dx, dy = (30.0, 0.0) if curved else ((end[0] - start[0]) / 3, (end[1] - start[1]) / 3)
    corners = [start, (start[0] + dx, start[1] + dy), (end[0] - dx, end[1] - dy), end]
    axes.add_patch(
        FancyArrowPatch(
            path=Path(corners, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]),
            arrowstyle="<|-|>" if both else "-|>",
            mutation_scale=10,
            linewidth=1.3,
            color=LIGHT[color],
            shrinkA=0,
            shrinkB=0,
        )
    )
    if words:
        x, y = at or ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 - 8)
        text(axes, (x, y), words, size=8.5, color=LIGHT[color], ha="center")


def as_svg(figure: Figure) -> str:
    FigureCanvasSVG(figure)
    stream = io.StringIO()
    # Ids are hashes with this salt: without one they differ from run to run.
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "megatron_rl", "hatch.linewidth": 0.6}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None}, facecolor="none")
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def as_png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    stream = io.BytesIO()
    with matplotlib.rc_context({"hatch.linewidth": 0.6}):
        figure.savefig(stream, format="png", dpi=150, facecolor="white")
    return stream.getvalue()
