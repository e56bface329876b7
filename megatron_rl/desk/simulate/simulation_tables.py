"""Tables and JSON of `megatron-rl simulate`: one prediction, several windows, a replay."""

import argparse
import json
from dataclasses import asdict, replace

from rich.console import Console
from rich.table import Table

from megatron_rl.config.schema import Mode
from megatron_rl.desk.simulate.calibration import calibrated
from megatron_rl.desk.simulate.prediction import PredictedMeans, Prediction, compute_means, seconds_until
from megatron_rl.desk.simulate.recorded_run import RecordedRun, config_of_run
from megatron_rl.desk.simulate.scenario import Scenario, make_scenario
from megatron_rl.desk.simulate.simulation_request import (
    Replayed,
    SimulationRequest,
    own_scenario,
    predicted,
    replay_fitted,
    replay_measured,
)
from megatron_rl.desk.simulate.timing import Timing, read_timing
from megatron_rl.errors import UserError
from megatron_rl.schedule.table import GENERATE


def show_replay(run: RecordedRun, arguments: argparse.Namespace) -> int:
    scenario = own_scenario(run)
    replays = {"measured seconds of every stage": replay_measured(run, scenario)}
    if run.rounds:
        timing = read_timing(arguments.timing) if arguments.timing else calibrated(run, scenario)
        replays["fitted costs of the recorded rows"] = replay_fitted(run, scenario, timing)
    if arguments.json:
        print(json.dumps({name: _replay_numbers(one) for name, one in replays.items()}, indent=2))
        return 0
    table = Table(title=f"{run.folder}: {run.num_steps} steps, {config_of_run(run).schedule.mode.value}", title_justify="left")
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


def note_free_stages(request: SimulationRequest) -> None:
    """Print the stages of the graph that have no costs in the file of ``--timing``."""
    # A generate stage costs decode and prefill in any case.
    known = {GENERATE, *request.timing.stages}
    free = [stage.name for stage in request.scenario.graph if stage.name not in known]
    if free:
        print(f"note: --timing has no costs of {', '.join(free)}; these stages take no time")


def compare_windows(arguments: argparse.Namespace, request: SimulationRequest) -> int:
    most = request.scenario.max_response_tokens
    too_long = [window for window in arguments.windows if window > most]
    if too_long:
        raise UserError(
            f"--windows: {too_long} are longer than the longest response (batch.max_response_tokens={most})"
        )
    mode = request.config.schedule.mode if request.scenario.facts.windows else Mode.tppo
    scenarios = {"sync": _scenario_with(request, Mode.sync, window=0)}
    scenarios |= {f"{window:,}": _scenario_with(request, mode, window) for window in arguments.windows}
    outcomes = {name: compute_means(predicted(arguments, request, one)) for name, one in scenarios.items()}
    if arguments.json:
        print(json.dumps({name: asdict(outcome) for name, outcome in outcomes.items()}, indent=2))
        return 0
    title = f"{request.workload.lengths.text}, {request.scenario.num_slots} slots"
    _print_windows(outcomes, title, request.timing if request.guesses_overlap else None)
    return 0


def _scenario_with(request: SimulationRequest, mode: Mode, window: int) -> Scenario:
    """The scenario of the changed recipe: the mode also determines which responses train together."""
    config = request.config
    schedule, batch = replace(config.schedule, mode=mode), replace(config.batch, window_tokens=window)
    return replace(make_scenario(replace(config, schedule=schedule, batch=batch)), limits=request.scenario.limits)


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


def show_prediction(
    arguments: argparse.Namespace, request: SimulationRequest, prediction: Prediction, pair: tuple[PredictedMeans, PredictedMeans] | None
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
        f"{request.config.schedule.mode.value}, {scenario.num_slots} slots on {scenario.num_servers} server(s), window "
        f"{scenario.window_tokens:,} of {scenario.max_response_tokens:,} tokens; lengths: {request.workload.lengths.text}"
    )
    table = Table(title=title, title_justify="left")
    table.add_column(f"means over {outcome.num_steps} steps")
    for column in ("simulated", *(("real", "error") if measured else ())):
        table.add_column(column, justify="right")
    measured_lines = _lines(measured) if measured else {}
    for name, (value, form) in _lines(outcome).items():
        row = [name, form.format(value)]
        if measured:
            other = measured_lines.get(name, (0.0, ""))[0]
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
    if request.guesses_overlap and scenario.facts.windows:
        _print_guess(request.timing)


def _print_guess(timing: Timing) -> None:
    print(
        f"note: no stages overlapped in the run that the costs come from; stages that share cores are assumed to run at "
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
