"""`megatron-rl simulate`: predict the times of a run from a recipe and a finished run's measurements."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_rl.config.load import load_config
from megatron_rl.config.schema import Mode
from megatron_rl.desk.costs.gpus import gpu
from megatron_rl.desk.simulate.calibration import calibrated
from megatron_rl.desk.simulate.comparison import Replayed, observed, replay_fitted, replay_measured
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
    seconds_until,
)
from megatron_rl.desk.simulate.recorded_run import RecordedRun, prompt_lengths, read_run
from megatron_rl.desk.simulate.scenario import Scenario, make_scenario
from megatron_rl.desk.simulate.timing import Timing, read_timing, write_timing
from megatron_rl.errors import UserError
from megatron_rl.system.command_line.cli_types import positive_int, positive_number, split_overrides
from megatron_rl.tracking.timeline import Timeline

_STEPS_THAT_COUNT = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("words", nargs="*", metavar="RECIPE.yaml or key=value", help="recipe or overrides to simulate; with --run, changes to that run")
    add("--config", action="append", default=[], help="YAML recipe; may be repeated, later files override earlier ones")
    add(
        "--run", dest="from_run", type=Path, metavar="RUN", help="folder of a finished run, to take its costs, lengths and keys"
    )
    add("--against", type=Path, metavar="RUN", help="simulate this run's configuration and lengths, and show both next to each other")
    add("--lengths", metavar="LENGTHS", help="response lengths: name:key=value,... or a file or a run's folder (docs/simulate.md)")
    add("--prompts", metavar="LENGTHS", help=f"prompt lengths (default without --run: {DEFAULT_PROMPTS})")
    add("--timing", type=Path, metavar="FILE", help="YAML file of costs, instead of a run's")
    add("--gpu", metavar="NAME", help="estimate the costs of the configuration on this GPU type (docs/estimates.md)")
    add("--save-timing", type=Path, metavar="FILE", help="write the costs in use to this file")
    add("--windows", type=positive_int, nargs="+", metavar="TOKENS", help="compare these windows with sync")
    add("--steps", type=positive_int, help=f"steps to simulate (default: until slot lengths are stationary, plus {_STEPS_THAT_COUNT})")
    add("--seed", type=int, default=1, help="random seed for sampling response lengths (default: %(default)s)")
    add("--tokens", type=positive_number, help="also predict the seconds until this many tokens are generated")
    add("--responses", type=positive_number, help="also predict the seconds until this many responses have finished")
    add("--replay", action="store_true", help="replay the run's own stages on the simulated clock, and compare with the real seconds")
    add("--trace", type=Path, metavar="FILE.json", help="write a timeline for Perfetto")
    add("--json", action="store_true", help="print the results as JSON")


@dataclass(frozen=True)
class _SimulationRequest:
    scenario: Scenario
    workload: Workload
    timing: Timing
    real: RecordedRun | None
    """Recorded run whose configuration is simulated, or None if the configuration was changed."""
    guesses_overlap: bool
    """True if stages overlap here that did not overlap in the run that the costs come from."""


def run(arguments: argparse.Namespace) -> int:
    named, overrides = split_overrides(arguments.words)
    paths = [*arguments.config, *named]
    source = read_run(arguments.from_run) if arguments.from_run else None
    if arguments.replay:
        if source is None:
            raise UserError("--replay: expected --run RUN, the run to replay")
        return _replay(source, arguments)
    request = _request(arguments, source, paths, overrides)
    if arguments.save_timing:
        write_timing(arguments.save_timing, request.timing)
    if arguments.windows:
        return _compare_windows(arguments, request)
    prediction = _predicted(arguments, request)
    if arguments.trace:
        timeline = Timeline(max_spans=max(len(prediction.spans), 1), spans=prediction.spans)
        timeline.write(arguments.trace)
    real = observed(request.real, request.scenario, request.timing) if request.real and request.real.rounds else None
    _show(arguments, request, prediction, _simulated_and_real(arguments, request, real) if real else None)
    return 0


def _request(
    arguments: argparse.Namespace, source: RecordedRun | None, paths: Sequence[str], overrides: Sequence[str]
) -> _SimulationRequest:
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
        timing = calibrated(source, _own_scenario(source))
    else:
        raise UserError(
            "expected --run RUN, --timing FILE or --gpu NAME: a simulation needs measured, given or estimated costs"
        )
    # Only an unchanged configuration can be compared with the real run.
    unchanged = target is not None and scenario == _own_scenario(target)
    calibrates = source is not None and not (arguments.timing or arguments.gpu)
    # A synchronous run has no overlap from which its cost could be fitted.
    guesses = calibrates and source is not None and _own_scenario(source).mode is Mode.sync and timing.overlap_rate < 1
    return _SimulationRequest(scenario, _workload(arguments, target), timing, target if unchanged else None, guesses)


def _own_scenario(run: RecordedRun) -> Scenario:
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


def _predicted(arguments: argparse.Namespace, request: _SimulationRequest, scenario: Scenario | None = None) -> Prediction:
    scenario = scenario or request.scenario
    steps = arguments.steps or scenario.num_settling_steps + _STEPS_THAT_COUNT
    return predict(scenario, request.workload, request.timing, num_steps=steps, seed=arguments.seed)


def _simulated_and_real(
    arguments: argparse.Namespace, request: _SimulationRequest, real: Prediction
) -> tuple[PredictedMeans, PredictedMeans]:
    """(simulated, real) outcome over the same steps: the real run's steps, simulated with several seeds."""
    num_steps = len(real.works)
    seeds = range(arguments.seed, arguments.seed + max(1, -(-_STEPS_THAT_COUNT // num_steps)))
    simulated = [
        predict(request.scenario, request.workload, request.timing, num_steps=num_steps, seed=seed, first=real.first)
        for seed in seeds
    ]
    return mean_outcome([compute_means(one) for one in simulated]), compute_means(real)


def _replay(run: RecordedRun, arguments: argparse.Namespace) -> int:
    scenario = _own_scenario(run)
    replays = {"measured seconds of every stage": replay_measured(run, scenario)}
    if run.rounds:
        timing = read_timing(arguments.timing) if arguments.timing else calibrated(run, scenario)
        replays["fitted costs of the recorded rows"] = replay_fitted(run, scenario, timing)
    if arguments.json:
        print(json.dumps({name: _replay_numbers(one) for name, one in replays.items()}, indent=2))
        return 0
    table = Table(title=f"{run.folder}: {run.num_steps} steps, {scenario.mode.value}", title_justify="left")
    for column in ("on the clock", "simulated s", "real s", "error", "median step error"):
        table.add_column(column, justify="left" if column == "on the clock" else "right")
    for name, one in replays.items():
        seconds = (f"{one.step_s.sum():.2f}", f"{one.real_step_s.sum():.2f}")
        table.add_row(name, *seconds, f"{one.error:+.2%}", f"{one.step_error:.2%}")
    Console().print(table)
    return 0


def _replay_numbers(one: Replayed) -> dict[str, float]:
    return {
        "simulated_s": float(one.step_s.sum()),
        "real_s": float(one.real_step_s.sum()),
        "error": one.error,
        "median_step_error": one.step_error,
    }


def _compare_windows(arguments: argparse.Namespace, request: _SimulationRequest) -> int:
    base, most = request.scenario, request.scenario.max_response_tokens
    too_long = [window for window in arguments.windows if window > most]
    if too_long:
        raise UserError(
            f"--windows: {too_long} are longer than a response may become (batch.max_response_tokens={most})"
        )
    scenarios = {"sync": replace(base, mode=Mode.sync, window_tokens=most, jitter_tokens=0)}
    for window in arguments.windows:
        jitter = min(base.jitter_tokens or 128, window) if window < most else 0
        mode = Mode.tppo if base.mode is Mode.sync else base.mode
        scenarios[f"{window:,}"] = replace(base, mode=mode, window_tokens=window, jitter_tokens=jitter)
    outcomes = {name: compute_means(_predicted(arguments, request, one)) for name, one in scenarios.items()}
    if arguments.json:
        print(json.dumps({name: asdict(outcome) for name, outcome in outcomes.items()}, indent=2))
        return 0
    title = f"{request.workload.lengths.text}, {base.num_slots} slots"
    _print_windows(outcomes, title, request.timing if request.guesses_overlap else None)
    return 0


def _print_windows(outcomes: dict[str, PredictedMeans], title: str, guess: Timing | None) -> None:
    table = Table(title=title, title_justify="left")
    columns = ("window", "step s", "finished/s", "vs. sync", "tokens/s", "rollout idle", "trainer idle")
    for column in (*columns, "unfinished", "prefixes"):
        table.add_column(column, justify="right")
    for name, one in outcomes.items():
        gain = one.finished_per_s / max(outcomes["sync"].finished_per_s, 1e-12)
        rates = (f"{one.step_s:.4g}", f"{one.finished_per_s:.4g}", f"{gain:.2f}", f"{one.tokens_per_s:,.0f}")
        shares = (one.rollout_idle, one.trainer_idle, one.unfinished_share, one.prefix_share)
        table.add_row(name, *rates, *(f"{share:.0%}" for share in shares))
    Console().print(table)
    if guess is not None:
        _print_guess(guess)
    print(
        "unfinished: tokens trained in windows of unfinished responses; prefixes: tokens that passes process again"
    )


def _show(
    arguments: argparse.Namespace, request: _SimulationRequest, prediction: Prediction, pair: tuple[PredictedMeans, PredictedMeans] | None
) -> None:
    outcome, measured = pair or (compute_means(prediction), None)
    until = {
        name: seconds_until(prediction, **{name: getattr(arguments, name)})
        for name in ("tokens", "responses")
        if getattr(arguments, name)
    }
    if arguments.json:
        numbers = {"simulated": asdict(outcome), "seconds_until": until, "real": asdict(measured) if measured else None}
        print(json.dumps(numbers | {"lengths": request.workload.lengths.text}, indent=2))
        return
    scenario = request.scenario
    title = (
        f"{scenario.mode.value}, {scenario.num_slots} slots on {scenario.num_servers} server(s), window "
        f"{scenario.window_tokens:,} of {scenario.max_response_tokens:,} tokens; lengths: {request.workload.lengths.text}"
    )
    table = Table(title=title, title_justify="left")
    table.add_column(f"means over {outcome.num_steps} steps")
    for column in ("simulated", *(("real", "error") if measured else ())):
        table.add_column(column, justify="right")
    theirs = _lines(measured) if measured else {}
    for name, (value, form) in _lines(outcome).items():
        row = [name, form.format(value)]
        if measured:
            other = theirs.get(name, (0.0, ""))[0]
            if name.startswith("oldest"):
                row += ["", ""]  # runs do not record this value
                table.add_row(*row)
                continue
            differs = "" if "{:.0%}" in form else f"{value / other - 1:+.1%}" if other > 1e-3 else ""
            row += [form.format(other), differs]
        table.add_row(*row)
    for name, seconds in until.items():
        table.add_row(f"seconds until {getattr(arguments, name):,.0f} {name}", f"{seconds:,.0f}")
    Console().print(table)
    if request.guesses_overlap and scenario.mode is not Mode.sync:
        _print_guess(request.timing)


def _print_guess(timing: Timing) -> None:
    print(
        f"note: nothing overlapped in the run that the costs come from; stages that share cores are assumed to run at "
        f"{timing.overlap_rate:g} of their speed (overlap_rate of --save-timing)"
    )


def _lines(outcome: PredictedMeans) -> dict[str, tuple[float, str]]:
    """Rows of the table: maps a name to (value, format)."""
    seconds, share = "{:.4g}", "{:.0%}"
    return {
        "seconds per step": (outcome.step_s, seconds),
        **{f"  {name}": (value, seconds) for name, value in outcome.stage_s.items() if value >= 0.002 * outcome.step_s},
        "rollout idle": (outcome.rollout_idle, share),
        "trainer idle": (outcome.trainer_idle, share),
        "finished responses per second": (outcome.finished_per_s, seconds),
        "tokens per second": (outcome.tokens_per_s, "{:,.1f}"),
        "trained tokens in unfinished windows": (outcome.unfinished_share, share),
        "prefixes in the policy's passes": (outcome.prefix_share, share),
        "tokens prefilled again per step": (outcome.reprefilled_per_step, "{:,.0f}"),
        "oldest token at the critic, in versions": (outcome.oldest_age, "{:.0f}"),
    }
