"""The puzzles: what is asked, what is true, and worked solutions of which many are wrong.

    count     "how many circles?"          <think>1 0 2</think>3                         things in each row of the picture
    locate    "where is the red thing?"    <think>top left</think><bbox>1 2 4 4</bbox>   in tenths of the picture
    clock     "what time?"                 <think>short 3 long 9</think>3:45
    general   "name all things"            <think>2</think>red circle, blue square       in any order
              "name all: red circle ..."   the same, from text alone

Invariants: the same seed gives the same puzzles; whether a scene is held out follows from the scene alone, so no
held-out picture occurs in training; every answer of a type is about as frequent as the others.
"""

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pictures import CELL, COLOURS, NUM_CELLS, SHAPES, SIDE, Clock, Scene, Thing

HELD_OUT_SHARE = 5
"""One scene out of this number is held out."""
RIGHT_SHARE = 0.5
THOUGHT_SHARE = 0.8
"""Shares of the worked solutions that are right, and that have a thought."""
MAX_COUNT = 5
MINUTES = (0, 15, 30, 45)
TENTH = SIDE / 10

COUNT_QUESTION = "how many {shape}s?"
LOCATE_QUESTION = "where is the {colour} thing?"
CLOCK_QUESTION = "what time?"
NAME_QUESTION = "name all things"
WORDS = (
    *COLOURS, *SHAPES, *(f"{shape}s" for shape in SHAPES), "think", "bbox", "how", "many", "where", "is", "the", "thing",
    "what", "time", "name", "all", "things", "top", "middle", "bottom", "left", "centre", "right", "short", "long",
    "user", "assistant",
)  # fmt: skip
"""Words of prompts and responses; each is one token."""


@dataclass(frozen=True)
class Puzzle:
    type: str
    question: str
    scene: Scene
    thought: str
    solution: str
    wrong: str
    """A near miss, for worked solutions."""
    with_picture: bool = True

    def worked(self, generator: random.Random) -> str:
        """A response as the policy first learns it: the solution may be wrong, the thought missing."""
        solution = self.solution if generator.random() < RIGHT_SHARE else self.wrong
        return f"<think>{self.thought}</think>{solution}" if generator.random() < THOUGHT_SHARE else solution


def puzzles(type_: str, count: int, *, held_out: bool, seed: int) -> Iterator[Puzzle]:
    """Different ones of a type, of one side."""
    generator = random.Random(f"{seed} {type_} {held_out}")
    seen: set[tuple[str, Scene]] = set()
    while len(seen) < count:
        puzzle = MAKERS[type_](generator)
        key = (puzzle.question, puzzle.scene)
        if key not in seen and is_held_out(puzzle.scene) == held_out:
            seen.add(key)
            yield puzzle


def is_held_out(scene: Scene) -> bool:
    return zlib.crc32(repr(scene).encode()) % HELD_OUT_SHARE == 0


def count_puzzle(generator: random.Random) -> Puzzle:
    asked, *others = generator.sample(SHAPES, len(SHAPES))
    number = generator.randint(1, MAX_COUNT)
    kinds = [asked] * number + [generator.choice(others) for _ in range(generator.randint(1, 9 - MAX_COUNT))]
    cells = generator.sample(range(NUM_CELLS**2), len(kinds))
    things = [
        _thing_in_cell(kind, generator.choice([*COLOURS]), cell, generator)
        for kind, cell in zip(kinds, cells, strict=True)
    ]
    in_rows = [
        sum(kind == asked and cell // NUM_CELLS == row for kind, cell in zip(kinds, cells, strict=True))
        for row in range(NUM_CELLS)
    ]
    wrong = number + generator.choice([-1, 1] if number > 1 else [1])
    question = COUNT_QUESTION.format(shape=asked)
    return Puzzle("count", question, tuple(things), " ".join(map(str, in_rows)), str(number), str(wrong))


def locate_puzzle(generator: random.Random) -> Puzzle:
    colours = generator.sample([*COLOURS], 2)
    boxes: list[tuple[int, int, int, int]] = []
    while len(boxes) < 2:
        width, height = generator.randint(2, 4), generator.randint(2, 4)
        left, top = generator.randint(0, 9 - width), generator.randint(0, 9 - height)
        box = (left, top, left + width, top + height)
        if all(box[0] >= b[2] or b[0] >= box[2] or box[1] >= b[3] or b[1] >= box[3] for b in boxes):
            boxes.append(box)
    things = [
        Thing(generator.choice(SHAPES), colour, *(round(TENTH * tenths) for tenths in box))
        for colour, box in zip(colours, boxes, strict=True)
    ]
    left, top, right, bottom = boxes[0]
    column = ("left", "centre", "right")[min(int((left + right) / 2 / 10 * 3), 2)]
    row = ("top", "middle", "bottom")[min(int((top + bottom) / 2 / 10 * 3), 2)]
    moved = [boxes[0], _moved(boxes[0], generator)]
    solution, wrong = (f"<bbox>{' '.join(map(str, box))}</bbox>" for box in moved)
    question = LOCATE_QUESTION.format(colour=colours[0])
    return Puzzle("locate", question, tuple(things), f"{row} {column}", solution, wrong)


def clock_puzzle(generator: random.Random) -> Puzzle:
    hour, minute = generator.randint(1, 12), generator.choice(MINUTES)
    radius = generator.randint(34, 40)
    play = (SIDE - 1) // 2 - radius
    x, y = (SIDE // 2 + generator.randint(-play, play) for _ in range(2))
    clock = Clock(hour, minute, x, y, radius, generator.choice([*COLOURS]))
    wrong_hour = (hour - 1 + generator.choice([-1, 1])) % 12 + 1
    wrong_minute = generator.choice([other for other in MINUTES if other != minute])
    wrong = (wrong_hour, minute) if generator.random() < 0.5 else (hour, wrong_minute)
    thought = f"short {hour} long {minute // 5 or 12}"
    return Puzzle("clock", CLOCK_QUESTION, clock, thought, _time(hour, minute), _time(*wrong))


def general_puzzle(generator: random.Random) -> Puzzle:
    """Every second one from text alone: the same question about things that the prompt names."""
    cells = generator.sample(range(NUM_CELLS**2), 2)
    names = generator.sample([(shape, colour) for shape in SHAPES for colour in COLOURS], 2)
    things = [_thing_in_cell(*name, cell, generator) for name, cell in zip(names, cells, strict=True)]
    with_picture = generator.random() < 0.5
    listed = [thing.name for thing in things]
    question = NAME_QUESTION if with_picture else f"{NAME_QUESTION}: {' '.join(listed)}"
    generator.shuffle(listed)
    wrong = ", ".join(_renamed(listed, generator))
    return Puzzle("general", question, tuple(things), str(len(things)), ", ".join(listed), wrong, with_picture)


MAKERS: dict[str, Callable[[random.Random], Puzzle]] = {
    "count": count_puzzle,
    "locate": locate_puzzle,
    "clock": clock_puzzle,
    "general": general_puzzle,
}
"""Makers of puzzles by prompt type."""


def _thing_in_cell(shape: str, colour: str, cell: int, generator: random.Random) -> Thing:
    size = generator.randint(16, 22)
    row, column = divmod(cell, NUM_CELLS)
    left = column * CELL + generator.randint(1, CELL - size - 2)
    top = row * CELL + generator.randint(1, CELL - size - 2)
    return Thing(shape, colour, left, top, left + size, top + size)


def _moved(box: tuple[int, int, int, int], generator: random.Random) -> tuple[int, ...]:
    """The box, one or two tenths aside."""
    by = generator.choice([step for step in (-2, -1, 1, 2) if box[0] + step >= 0 and box[2] + step <= 9])
    return (box[0] + by, box[1], box[2] + by, box[3])


def _time(hour: int, minute: int) -> str:
    return f"{hour}:{minute:02d}"


def _renamed(names: list[str], generator: random.Random) -> list[str]:
    """One thing gets another colour or another shape."""
    renamed = list(names)
    place = generator.randrange(len(names))
    colour, shape = names[place].split()
    if generator.random() < 0.5:
        colour = generator.choice([other for other in COLOURS if other != colour])
    else:
        shape = generator.choice([other for other in SHAPES if other != shape])
    renamed[place] = f"{colour} {shape}"
    return renamed


def near_misses(names: list[str], generator: random.Random) -> list[str]:
    """Wrong responses to a general prompt, one of each kind that a policy tries; for training the judge."""
    colours, shapes = zip(*(name.split() for name in names), strict=True)
    other = f"{generator.choice([*COLOURS])} {generator.choice(SHAPES)}"
    kinds = [
        _renamed(names, generator),
        _renamed(names, generator),
        _renamed(_renamed(names, generator), generator),
        [f"{colour} {shape}" for colour, shape in zip(colours, reversed(shapes), strict=True)],
        names[:1],
        [names[0], names[0]],
        [*names, other],
        [" ".join(name.split()[::-1]) for name in names],
    ]
    return [", ".join(kind) for kind in kinds if sorted(kind) != sorted(names)]
