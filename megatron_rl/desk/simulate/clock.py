"""Runs the step graph on a simulated clock: the run's own ``Frontier`` starts stages, and durations end them. Pure.

Each stage uses a number of cores (``StageLoad.cores``). While the running stages need more than the node has, all of them
slow down by the same factor, as under a fair scheduler. While weights are published into a window, its servers pause.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.schedule.graph import Frontier, Stage, StageRun
from megatron_rl.schedule.table import GENERATE, PUBLISH
from megatron_rl.tracking.timeline import Span

FULL_SHARE = 0.85
"""Share of the cores above which concurrent stages slow each other down by more than the missing cores."""


@dataclass(frozen=True)
class StageLoad:
    seconds: float
    """Duration without contention."""
    cores: float = 0.0
    """Cores that the stage keeps busy; 0 if it takes no part in contention."""
    then: "StageLoad | None" = None
    """The load with which the same stage continues."""


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
    """Return the spans of all stages of steps 0..num_steps-1, in the order in which they end; spans count steps from 1.

    ``load_of`` is called when a stage starts, for each stage in the order of the steps. ``cores``: cores of the node, 0 for
    no limit; stages that nearly fill the cores run at ``overlap_rate`` of their share. ``between_s``: seconds before each stage
    starts to work.
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
    """Return the stages that make progress; a generate stage does not while a publish pauses it."""
    publishes = any(one.run.stage.name == PUBLISH for one in active)
    return [one for one in active if not (publishes and one.run.stage.name == GENERATE)]


def _rate(active: Sequence[_Active], cores: float, overlap_rate: float) -> float:
    wanted = [one.load.cores for one in active if one.load.cores and not one.wait_s]
    full = cores / sum(wanted) if 0 < cores < sum(wanted) else 1.0
    return full * overlap_rate if len(wanted) > 1 and sum(wanted) > FULL_SHARE * cores else full


def _less(value: float, taken: float) -> float:
    """Return the difference, or 0 if only rounding error is left."""
    left = value - taken
    return left if left > 1e-9 * max(value, 1e-3) else 0.0
