"""Compares a simulated run with a real one: with measured seconds, with fitted costs, and with sampled lengths."""

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
    """A real run's steps, replayed on the simulated clock."""

    step_s: np.ndarray
    real_step_s: np.ndarray

    @property
    def error(self) -> float:
        """Relative error of the total time."""
        return float(self.step_s.sum() / self.real_step_s.sum() - 1)

    @property
    def step_error(self) -> float:
        """Median over the steps of the absolute relative error."""
        return float(np.median(np.abs(self.step_s / self.real_step_s - 1)))


def observed(run: RecordedRun, scenario: Scenario, timing: Timing) -> Prediction:
    """Return a real run in the form of a prediction; only its steps with facts count."""
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
    """Return the work of each step, in order. A run does not record the age of its tokens, so the age is 0."""
    return [recorded_work(run.rounds[step], step, scenario, timing) for step in run.steps]


def replay_measured(run: RecordedRun, scenario: Scenario) -> Replayed:
    """Replay with each stage's measured seconds, so that any remaining error comes from the schedule."""
    seconds = {stage.name: run.seconds(stage.name) for stage in scenario.graph}
    return _replayed(run, scenario, lambda name, step: StageLoad(seconds[name].get(step, 0.0)), {})


def replay_fitted(run: RecordedRun, scenario: Scenario, timing: Timing) -> Replayed:
    """Replay with seconds predicted by the fitted costs from each stage's rows."""
    works = dict(zip(run.steps, recorded_works(run, scenario, timing), strict=True))

    def load_of(name: str, step: int) -> StageLoad:
        return stage_load(name, works[step], step - 1, scenario, timing, last=step == run.steps[-1])

    found = _replayed(run, scenario, load_of, timing.sharing)
    # The first step compiles and fills caches, which the costs do not include.
    return Replayed(found.step_s[1:], found.real_step_s[1:]) if run.num_steps > 1 else found


def _replayed(
    run: RecordedRun, scenario: Scenario, load_of: Callable[[str, int], StageLoad], options: Mapping[str, float]
) -> Replayed:
    def at(stage_run: StageRun) -> StageLoad:
        return load_of(stage_run.stage.name, run.steps[stage_run.step])

    spans = run_clock(scenario.graph, at, run.num_steps, **options)
    ends = np.array([span.end_s for span in spans if span.name == LAST])
    return Replayed(np.diff(ends, prepend=0.0), run.step_s)
