"""A simulated run beside a real one: the same stages with measured seconds, with fitted ones, and over drawn lengths."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.desk.simulate.calibration import recorded_work
from megatron_rl.desk.simulate.clock import StageLoad, run_clock
from megatron_rl.desk.simulate.prediction import Prediction, StepWork, stage_load
from megatron_rl.desk.simulate.recorded_run import RecordedRun
from megatron_rl.desk.simulate.scenario import Scenario
from megatron_rl.desk.simulate.timing import Timing
from megatron_rl.schedule.graph import StageRun
from megatron_rl.schedule.table import LAST


@dataclass(frozen=True)
class Replayed:
    """The steps of a real run on the clock."""

    step_s: np.ndarray
    real_step_s: np.ndarray

    @property
    def error(self) -> float:
        """Of the whole time, as a share of the real one."""
        return float(self.step_s.sum() / self.real_step_s.sum() - 1)

    @property
    def step_error(self) -> float:
        """Median over the steps of each one's error, without its sign."""
        return float(np.median(np.abs(self.step_s / self.real_step_s - 1)))


def observed(run: RecordedRun, scenario: Scenario, timing: Timing) -> Prediction:
    """A real run in the form of a simulated one; only its steps with facts count."""
    begin_s = min(span.start_s for span in run.spans)
    place = {step: index + 1 for index, step in enumerate(run.steps)}
    spans = [
        replace(span, start_s=span.start_s - begin_s, end_s=span.end_s - begin_s, step=place[span.step])
        for span in sorted(run.spans, key=lambda span: span.end_s)
    ]
    works = recorded_works(run, scenario, timing)
    settled = scenario.num_settling_steps
    # A short run counts from its second step: the first one compiles and fills caches.
    return Prediction(scenario, spans, works, settled if settled < len(works) // 2 else min(1, len(works) - 1))


def recorded_works(run: RecordedRun, scenario: Scenario, timing: Timing) -> list[StepWork]:
    """By step, in order; how old its tokens are a run does not record, so the age is 0."""
    return [recorded_work(run.rounds[step], step, scenario, timing) for step in run.steps]


def replay_measured(run: RecordedRun, scenario: Scenario) -> Replayed:
    """Every stage takes what it took: what is left of an error is the schedule's."""
    seconds = {stage.name: run.seconds(stage.name) for stage in scenario.graph}
    return _replayed(run, scenario, lambda name, step: StageLoad(seconds[name].get(step, 0.0)), {})


def replay_fitted(run: RecordedRun, scenario: Scenario, timing: Timing) -> Replayed:
    """Every stage takes what the costs say of the rows that it had."""
    works = dict(zip(run.steps, recorded_works(run, scenario, timing), strict=True))

    def load_of(name: str, step: int) -> StageLoad:
        return stage_load(name, works[step], step - 1, scenario, timing, last=step == run.steps[-1])

    found = _replayed(run, scenario, load_of, timing.sharing)
    # The first one compiles and fills caches, which no costs know.
    return Replayed(found.step_s[1:], found.real_step_s[1:]) if run.num_steps > 1 else found


def _replayed(
    run: RecordedRun, scenario: Scenario, load_of: Callable[[str, int], StageLoad], options: Mapping[str, float]
) -> Replayed:
    def at(stage_run: StageRun) -> StageLoad:
        return load_of(stage_run.stage.name, run.steps[stage_run.step])

    spans = run_clock(scenario.graph, at, run.num_steps, **options)
    ends = np.array([span.end_s for span in spans if span.name == LAST])
    return Replayed(np.diff(ends, prepend=0.0), run.step_s)
