"""Pictures of the visual puzzles: coloured things on a white ground, and clock faces.

Invariants: a picture follows from its scene alone, to the pixel; a scene is small and hashable, so that scenes tell
which pictures are held out. 84 x 84 pixels are 3 x 3 tokens of the model in ``vision_model.py``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

SIDE = 84
"""Side of a picture in pixels."""
NUM_CELLS = 3
"""Cells per row, and rows; one token of the model covers one cell."""
CELL = SIDE // NUM_CELLS
COLOURS = {"red": (220, 30, 30), "green": (20, 150, 40), "blue": (40, 60, 230)}
SHAPES = ("circle", "square", "triangle")


@dataclass(frozen=True)
class Thing:
    """A shape that fills the box from (left, top) to (right, bottom), in pixels, borders included."""

    shape: str
    colour: str
    left: int
    top: int
    right: int
    bottom: int

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Clock:
    """A clock face; the hour hand stands on its hour, also between hours."""

    hour: int
    """1 to 12."""
    minute: int
    x: int
    """Position of the center in pixels, as are y and radius."""
    y: int
    radius: int
    colour: str
    """Color of the hands."""


Scene = tuple[Thing, ...] | Clock


def draw(scene: Scene) -> Image.Image:
    """[SIDE, SIDE] pixels, RGB."""
    image = Image.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(image)
    if isinstance(scene, Clock):
        _draw_clock(pen, scene)
    else:
        for thing in scene:
            _draw_thing(pen, thing)
    return image


def sheet(rows: Sequence[Sequence[Scene]], *, gap: int = 8) -> Image.Image:
    """Several pictures on one, for people."""
    step = SIDE + gap
    image = Image.new("RGB", (step * max(map(len, rows)) + gap, step * len(rows) + gap), (170, 170, 170))
    for y, scenes in enumerate(rows):
        for x, scene in enumerate(scenes):
            image.paste(draw(scene), (gap + x * step, gap + y * step))
    return image


def _draw_thing(pen: ImageDraw.ImageDraw, thing: Thing) -> None:
    box = (thing.left, thing.top, thing.right, thing.bottom)
    fill = COLOURS[thing.colour]
    if thing.shape == "circle":
        pen.ellipse(box, fill=fill)
    elif thing.shape == "square":
        pen.rectangle(box, fill=fill)
    else:
        top = ((thing.left + thing.right) / 2, thing.top)
        pen.polygon([top, (thing.right, thing.bottom), (thing.left, thing.bottom)], fill=fill)


def _draw_clock(pen: ImageDraw.ImageDraw, clock: Clock) -> None:
    x, y, radius = clock.x, clock.y, clock.radius
    pen.ellipse((x - radius, y - radius, x + radius, y + radius), outline="black", width=2)
    for hour in range(12):
        _draw_ray(pen, clock, hour / 12, 0.84, 0.94, width=1, fill=(0, 0, 0))
    _draw_ray(pen, clock, clock.hour / 12, 0.0, 0.45, width=6, fill=COLOURS[clock.colour])
    _draw_ray(pen, clock, clock.minute / 60, 0.0, 0.78, width=2, fill=(0, 0, 0))


def _draw_ray(
    pen: ImageDraw.ImageDraw, clock: Clock, turn: float, start: float, end: float, *, width: int, fill: tuple[int, ...]
) -> None:
    """Draw a line from ``start`` to ``end`` of the radius; ``turn`` 0 is upwards, 0.25 to the right."""
    across, down = math.sin(2 * math.pi * turn), -math.cos(2 * math.pi * turn)
    ends = [
        (clock.x + share * clock.radius * across, clock.y + share * clock.radius * down) for share in (start, end)
    ]
    pen.line(ends, fill=fill, width=width)
