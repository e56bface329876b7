"""The request of `megatron-rl simulate`, made from its arguments, and its simulation."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_rl.config.load import load_config
from megatron_rl.config.schema import Config
from megatron_rl.desk.costs.gpus import gpu
from megatron_rl.desk.simulate.calibration import calibrated
from megatron_rl.desk.simulate.estimated_costs import estimated_kv_tokens, estimated_timing
from megatron_rl.desk.simulate.length_arguments import DEFAULT_PROMPTS, config_of_run, load_lengths, parse_lengths
from megatron_rl.desk.simulate.lengths import named_lengths
from megatron_rl.desk.simulate.prediction import (
    PredictedMeans,
    Prediction,
    Workload,
    compute_means,
    mean_outcome,
    predict,
)
from megatron_rl.desk.simulate.recorded_run import RecordedRun, prompt_lengths, read_run
from megatron_rl.desk.simulate.scenario import Scenario, make_scenario
from megatron_rl.desk.simulate.timing import Timing, read_timing
from megatron_rl.errors import UserError

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
            "expected --lengths, for example --lengths lognormal:median=2000,sigma=1,max=24576, or a run that has them"
        )
    if arguments.prompts:
        return Workload(lengths, parse_lengths(arguments.prompts))
    return Workload(lengths, prompt_lengths(run) if run is not None and run.rounds else named_lengths(DEFAULT_PROMPTS))


def predicted(arguments: argparse.Namespace, request: SimulationRequest, scenario: Scenario | None = None) -> Prediction:
    scenario = scenario or request.scenario
    steps = arguments.steps or scenario.num_settling_steps + STEPS_THAT_COUNT
    return predict(scenario, request.workload, request.timing, num_steps=steps, seed=arguments.seed)


def predict_beside(arguments: argparse.Namespace, request: SimulationRequest, real: Prediction) -> tuple[PredictedMeans, PredictedMeans]:
    """(simulated, real) over the same steps: those of the real run, simulated with several seeds."""
    num_steps = len(real.works)
    seeds = range(arguments.seed, arguments.seed + max(1, -(-STEPS_THAT_COUNT // num_steps)))
    simulated = [
        predict(request.scenario, request.workload, request.timing, num_steps=num_steps, seed=seed, first=real.first)
        for seed in seeds
    ]
    return mean_outcome([compute_means(one) for one in simulated]), compute_means(real)
