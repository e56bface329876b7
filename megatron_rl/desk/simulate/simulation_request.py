"""Reads a request of `megatron-rl simulate` from its arguments, simulates it, and replays a real run for comparison."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_rl.config.load import load_config
from megatron_rl.config.schema import Config
from megatron_rl.desk.costs.gpus import gpu
from megatron_rl.desk.simulate.calibration import calibrated, recorded_work
from megatron_rl.desk.simulate.clock import StageLoad, run_clock
from megatron_rl.desk.simulate.estimated_costs import estimated_kv_tokens, estimated_timing
from megatron_rl.desk.simulate.lengths import named_lengths
from megatron_rl.desk.simulate.prediction import (
    PredictedMeans,
    Prediction,
    StepWork,
    Workload,
    compute_means,
    mean_outcome,
    predict,
    stage_load,
)
from megatron_rl.desk.simulate.recorded_run import (
    DEFAULT_PROMPTS,
    RecordedRun,
    config_of_run,
    load_lengths,
    parse_lengths,
    prompt_lengths,
    read_run,
)
from megatron_rl.desk.simulate.scenario import Scenario, make_scenario
from megatron_rl.desk.simulate.slot_simulation import parse_waits
from megatron_rl.desk.simulate.timing import Timing, read_timing
from megatron_rl.errors import UserError
from megatron_rl.schedule.graph import StageRun
from megatron_rl.schedule.table import LAST

STEPS_THAT_COUNT = 200


@dataclass(frozen=True)
class SimulationRequest:
    config: Config
    scenario: Scenario
    workload: Workload
    timing: Timing
    real: RecordedRun | None
    """Recorded run whose configuration is simulated, or None if the configuration was changed."""
    guesses_overlap: bool
    """True if stages overlap here that did not overlap in the run that the costs come from."""


def make_request(
    arguments: argparse.Namespace, source: RecordedRun | None, paths: Sequence[str], overrides: Sequence[str]
) -> SimulationRequest:
    target = read_run(arguments.against) if arguments.against else source
    if not paths and target is None:
        raise UserError(
            "expected a recipe (megatron-rl simulate RECIPE.yaml ...) or --run RUN, the folder of a finished run"
        )
    recipes: list[str | Path] = [*([target.folder / "config.yaml"] if target else []), *paths]
    config = load_config(recipes, overrides)
    scenario = make_scenario(config)
    if arguments.timing:
        timing = read_timing(arguments.timing)
    elif arguments.gpu:
        timing = estimated_timing(config, gpu(arguments.gpu))
        limits = scenario.limits
        kv_tokens = limits.kv_tokens or estimated_kv_tokens(config, gpu(arguments.gpu))
        scenario = replace(scenario, limits=replace(limits, kv_tokens=kv_tokens))
    elif source is not None:
        timing = calibrated(source, own_scenario(source))
    else:
        raise UserError(
            "expected --run RUN, --timing FILE or --gpu NAME: a simulation needs measured, given or estimated costs"
        )
    unchanged = target is not None and scenario == own_scenario(target)
    calibrates = source is not None and not (arguments.timing or arguments.gpu)
    # A synchronous run has no overlap from which its cost could be fitted.
    guesses = calibrates and source is not None and not own_scenario(source).facts.windows and timing.overlap_rate < 1
    return SimulationRequest(config, scenario, _workload(arguments, target), timing, target if unchanged else None, guesses)


def own_scenario(run: RecordedRun) -> Scenario:
    return make_scenario(config_of_run(run))


def _workload(arguments: argparse.Namespace, run: RecordedRun | None) -> Workload:
    if arguments.lengths:
        lengths = parse_lengths(arguments.lengths)
    elif run is not None and run.rounds:
        lengths = load_lengths(run)
    else:
        raise UserError(
            "expected --lengths, for example --lengths lognormal:median=2000,sigma=1,max=24576, or a run that recorded its lengths"
        )
    if arguments.prompts:
        prompts = parse_lengths(arguments.prompts)
    else:
        prompts = prompt_lengths(run) if run is not None and run.rounds else named_lengths(DEFAULT_PROMPTS)
    return Workload(lengths, prompts, parse_waits(arguments.tool_times))


def predicted(arguments: argparse.Namespace, request: SimulationRequest, scenario: Scenario | None = None) -> Prediction:
    scenario = scenario or request.scenario
    steps = arguments.steps or scenario.num_settling_steps + STEPS_THAT_COUNT
    return predict(scenario, request.workload, request.timing, num_steps=steps, seed=arguments.seed)


def predict_beside(arguments: argparse.Namespace, request: SimulationRequest, real: Prediction) -> tuple[PredictedMeans, PredictedMeans]:
    """Return the means (simulated, real) over the steps of the real run; the simulation averages several seeds."""
    num_steps = len(real.works)
    seeds = range(arguments.seed, arguments.seed + max(1, -(-STEPS_THAT_COUNT // num_steps)))
    simulated = [
        predict(request.scenario, request.workload, request.timing, num_steps=num_steps, seed=seed, first=real.first)
        for seed in seeds
    ]
    return mean_outcome([compute_means(one) for one in simulated]), compute_means(real)


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
    # The first step compiles and fills caches, so it never counts, and a short run counts from its second step.
    first = settled if 0 < settled < len(works) // 2 else 1
    return Prediction(scenario, spans, works, min(first, len(works) - 1))


def recorded_works(run: RecordedRun, scenario: Scenario, timing: Timing) -> list[StepWork]:
    """Return the work of each step, in order. A run does not record the age of its tokens, so the age is 0."""
    return [recorded_work(run.rounds[step], step, scenario, timing) for step in run.steps]


def replay_measured(run: RecordedRun, scenario: Scenario) -> Replayed:
    """Replay with each stage's measured seconds, so that any remaining error comes from the schedule."""
    seconds = {stage.name: run.seconds(stage.name) for stage in scenario.graph}
    return _replayed(run, scenario, lambda name, step: StageLoad(seconds[name].get(step, 0.0)), {})


def replay_fitted(run: RecordedRun, scenario: Scenario, timing: Timing) -> Replayed:
    """Replay with the seconds that the fitted costs predict from each stage's rows."""
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
