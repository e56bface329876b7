"""The step graph on a clock: the run's own ``Frontier`` says what may start, durations say when it ends. Pure.

Stages that share cores: each wants some (``Load.cores``); while those that run want more than the machine has, all of them
slow down alike, as under a fair scheduler. While weights are published into a window, its servers stand still.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.schedule.graph import Frontier, Stage, StageRun
from megatron_rl.schedule.table import GENERATE, PUBLISH
from megatron_rl.tracking.timeline import Span

FULL_SHARE = 0.85
"""Of the cores: stages that together want more than this share slow each other down beyond the cores that they lack."""


@dataclass(frozen=True)
class StageLoad:
    """One stage run."""

    seconds: float
    """Where nothing slows it down."""
    cores: float = 0.0
    """That it keeps busy meanwhile; 0: it neither slows others down nor is slowed down."""
    then: "StageLoad | None" = None
    """What the same stage goes on with."""


@dataclass
class _Active:
    run: StageRun
    load: StageLoad
    started_s: float
    wait_s: float
    left_s: float


def run_clock(
    graph: Sequence[Stage],
    load_of: Callable[[StageRun], StageLoad],
    num_steps: int,
    *,
    cores: float = 0.0,
    overlap_rate: float = 1.0,
    between_s: float = 0.0,
) -> list[Span]:
    """Spans of all stages of steps 0..num_steps-1, in the order in which they end; steps count from 1 in spans.

    ``load_of`` is asked when a stage starts, so of each stage in the order of the steps. ``cores``: of the machine, 0 for
    any number; where several stages nearly fill them, they run at ``overlap_rate`` of what is left to each. ``between_s`` passes
    before each stage begins to work.
    """
    frontier = Frontier(graph, 0, num_steps - 1)
    active: list[_Active] = []
    spans: list[Span] = []
    now_s = 0.0
    while not frontier.done:
        for run in frontier.ready():
            frontier.start(run)
            load = load_of(run)
            active.append(_Active(run, load, now_s + between_s, between_s, load.seconds))
        moving = _moving(active)
        rate = _rate(moving, cores, overlap_rate)
        next_s = min(one.wait_s or one.left_s / (rate if one.load.cores else 1.0) for one in moving)
        now_s += next_s
        for one in moving:
            if one.wait_s:
                one.wait_s = _less(one.wait_s, next_s)
            else:
                one.left_s = _less(one.left_s, next_s * (rate if one.load.cores else 1.0))
        for one in active:
            while not one.wait_s and not one.left_s and one.load.then is not None:
                one.load = one.load.then
                one.left_s = one.load.seconds
        for one in [one for one in active if not one.wait_s and not one.left_s]:
            active.remove(one)
            frontier.finish(one.run)
            stage = one.run.stage
            spans.append(Span(stage.name, stage.resource.value, one.started_s, now_s, one.run.step + 1))
    return spans


def _moving(active: Sequence[_Active]) -> list[_Active]:
    """Those that get on: a generate stage does not while a publish pauses it."""
    publishes = any(one.run.stage.name == PUBLISH for one in active)
    return [one for one in active if not (publishes and one.run.stage.name == GENERATE)]


def _rate(active: Sequence[_Active], cores: float, overlap_rate: float) -> float:
    wanted = [one.load.cores for one in active if one.load.cores and not one.wait_s]
    full = cores / sum(wanted) if 0 < cores < sum(wanted) else 1.0
    return full * overlap_rate if len(wanted) > 1 and sum(wanted) > FULL_SHARE * cores else full


def _less(value: float, taken: float) -> float:
    """What is left; 0 for what rounding leaves of it."""
    left = value - taken
    return left if left > 1e-9 * max(value, 1e-3) else 0.0
