"""The costs of a run, from the seconds and the facts in its timeline.

A generate stage's facts give, for every response, how long the server took. What a decode step costs follows from the
differences: between the ends of two responses lies a known number of decode steps with known numbers of running responses
and known context. Trainer stages: seconds against tokens. One run hardly tells a fixed part from one per token where all
its steps are alike; what it leaves open is taken as mostly per token (``_PRIOR``).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.errors import UserError
from megatron_rl.simulation.contention import Contention, contention_of
from megatron_rl.simulation.decoding import Served, serve, spread
from megatron_rl.simulation.fitting import robust
from megatron_rl.simulation.prediction import StepWork, is_due, work_of
from megatron_rl.simulation.recorded import RecordedRun, Round
from megatron_rl.simulation.scenario import Scenario
from megatron_rl.simulation.slot_process import Rows, Window, trained_rows
from megatron_rl.simulation.timing import Decode, Timing, Work

_ROWS_PER_ROUND = 24
"""Responses of a round whose times are compared; more would say the same."""
_PRIOR = {"token_s": 0.7, "row_s": 0.15, "fixed_s": 0.15, "update_s": 0.3}
"""Shares of a stage's seconds that each part has where the run does not tell them apart."""
_PRIOR_WEIGHT = 0.25
"""Of a prior share, in measurements."""
_FIXED = ("sleep", "publish", "record")
_UNITS = {
    "old_logprobs": ("token_s", "fixed_s"),
    "reference_logprobs": ("token_s", "fixed_s"),
    "values": ("token_s", "fixed_s"),
    "process_rewards": ("token_s", "fixed_s"),
    "advantages": ("token_s", "fixed_s"),
    "score": ("row_s", "fixed_s"),
    "update_policy": ("token_s", "update_s"),
    "update_critic": ("token_s", "update_s"),
}


def calibrated(run: RecordedRun, scenario: Scenario) -> Timing:
    """``scenario``: the run's own. Raises UserError for a run whose timeline does not say what its stages did."""
    steps = [step for step in run.steps if step in run.rounds]
    if len(steps) > 3:
        steps = steps[1:]  # the first one compiles, loads and fills caches
    if not steps:
        raise UserError(
            f"--run {run.folder}: its timeline does not say what its generate stages did (a run of an earlier version); run "
            "it again for a few steps, replay it with --replay, or give --timing and --lengths"
        )
    shared = contention_of(run, steps)
    timing = _engine(run, scenario, steps, shared)
    works = {step: recorded_work(run.rounds[step], step, scenario, timing) for step in steps}
    stages = {"generate": replace(_client(run, steps, works, shared), cores=shared.generate_cores)}
    for stage in scenario.graph:
        seconds = {step: s for step, s in shared.alone(run, stage.name).items() if step in works}
        cost = _stage_cost(stage.name, seconds, works, scenario)
        if cost is not None:
            stages[stage.name] = replace(cost, cores=shared.stage_cores.get(stage.name, 0.0))
    return replace(timing, stages=stages, between_s=_between_s(run, scenario), cores=shared.cores)


def recorded_window(rounds: Sequence[Round], scenario: Scenario, timing: Timing) -> Window:
    """What a recorded generate stage did, and how long its servers take for it under ``timing``."""
    rows, seconds = [], 0.0
    for one in rounds:
        whole = _all_rows(one)
        seconds += max((s.seconds for s in _served(whole, scenario, timing)), default=0.0)
        rows.append(whole)
    generated = rows[0]
    for more in rows[1:]:
        generated += more
    # What over-sampling discarded a run does not say; groups are unknown.
    trains = replace(scenario, num_slots=scenario.num_trained)
    return Window(generated, trained_rows(generated, trains), seconds)


def recorded_work(rounds: Sequence[Round], step: int, scenario: Scenario, timing: Timing) -> StepWork:
    return work_of(recorded_window(rounds, scenario, timing), step)


def _all_rows(one: Round) -> Rows:
    """Of rows that stand for more, each as often as it stands for one."""
    place = np.arange(one.num_rows) * len(one.new) // max(one.num_rows, 1)
    held, new = one.held[place], one.new[place]
    total = held + new + np.where(one.ended[place], 0, 1)
    unknown = np.zeros_like(new)
    return Rows(one.prompt[place], held, new, total, unknown, unknown, unknown)


def _served(rows: Rows, scenario: Scenario, timing: Timing) -> list[Served]:
    prefix = rows.prompt + rows.held
    return [
        serve(prefix[own], rows.new[own], timing, scenario.limits) for own in spread(len(rows), scenario.num_servers)
    ]


# The engine: decode and prefill.


def _engine(run: RecordedRun, scenario: Scenario, steps: Sequence[int], shared: Contention) -> Timing:
    most = max(one.num_rows for step in steps for one in run.rounds[step]) / scenario.num_servers
    nodes = (*(4**i for i in range(12) if 4**i < 0.7 * most), max(int(np.ceil(most)), 1))
    bases = _bases(nodes)
    features, targets, weights = [], [], []
    for step in steps:
        span = run.by_name("generate")[step]
        rounds = run.rounds[step]
        for one in rounds:
            rows = _all_rows(one)
            per_basis = [_finish_s(rows, scenario, basis) for basis in bases]
            finish = np.stack(per_basis, axis=1)
            seconds = one.seconds[np.arange(one.num_rows) * len(one.new) // max(one.num_rows, 1)]
            if np.mean(seconds > 0) > 0.9 and len(rounds) == 1:
                chosen = _even_choice(seconds)
                times = shared.undisturbed(span, seconds[chosen])
                features.append(np.diff(finish[chosen], axis=0, prepend=0.0))
                targets.append(np.diff(times, prepend=0.0))
        if not features or len(rounds) > 1:
            total = sum(_finish_s_total(_all_rows(one), scenario, bases) for one in rounds)
            features.append(np.atleast_2d(total))
            targets.append(np.array([shared.alone(run, "generate")[step]]))
    matrix, wanted = np.concatenate(features), np.concatenate(targets)
    some = wanted > 0
    # Differences between moments: their noise grows with the time between them.
    weights = 1.0 / np.maximum(wanted[some], 0.05 * float(np.median(wanted[some])))
    found = robust(matrix[some], wanted[some], weights)
    # As in _fitted: what disturbed single steps is part of the whole.
    found *= wanted.sum() / max(float((matrix @ found).sum()), 1e-12)
    step_s = np.cumsum(found[: len(nodes)])
    decode = Decode(tuple(map(float, nodes)), tuple(step_s.tolist()), float(found[len(nodes)]))
    return Timing(decode=decode, prefill=Work(token_s=float(found[-2]), row_s=float(found[-1])))


def _bases(nodes: Sequence[int]) -> list[Timing]:
    """Engines whose times add up, weighted by the coefficients, to the one that is looked for."""
    nothing = Decode((1.0,), (0.0,))
    floats = tuple(map(float, nodes))
    rising = [Decode(floats, tuple(float(i >= j) for i in range(len(nodes)))) for j in range(len(nodes))]
    return [
        *(Timing(decode=one) for one in rising),
        Timing(decode=replace(nothing, context_token_s=1.0)),
        Timing(decode=nothing, prefill=Work(token_s=1.0)),
        Timing(decode=nothing, prefill=Work(row_s=1.0)),
    ]


def _finish_s(rows: Rows, scenario: Scenario, timing: Timing) -> np.ndarray:
    finish = np.zeros(len(rows))
    for own, one in zip(spread(len(rows), scenario.num_servers), _served(rows, scenario, timing), strict=True):
        finish[own] = one.finish_s
    return finish


def _finish_s_total(rows: Rows, scenario: Scenario, bases: Sequence[Timing]) -> np.ndarray:
    return np.array([max(one.seconds for one in _served(rows, scenario, basis)) for basis in bases])


def _even_choice(seconds: np.ndarray) -> np.ndarray:
    """Some rows in the order of their ends, evenly over the time, the last one among them."""
    order = np.argsort(seconds, kind="stable")
    order = order[seconds[order] > 0]
    wanted = np.linspace(seconds[order[0]], seconds[order[-1]], _ROWS_PER_ROUND)
    return order[np.unique(np.searchsorted(seconds[order], wanted).clip(0, len(order) - 1))]


# What else a step takes.


def _client(run: RecordedRun, steps: Sequence[int], works: dict[int, StepWork], shared: Contention) -> Work:
    """Of a generate stage what is neither decode nor prefill: sending, parsing, packing."""
    alone = shared.alone(run, "generate")
    rest = np.array([alone[step] - works[step].generate_s for step in steps])
    units = {
        "token_s": np.array([works[step].new_tokens for step in steps], dtype=np.float64),
        "row_s": np.array([works[step].num_requests for step in steps], dtype=np.float64),
        "fixed_s": np.ones(len(steps)),
    }
    return _fitted(units, rest) if rest.mean() > 0 else Work()


def _stage_cost(name: str, seconds: dict[int, float], works: dict[int, StepWork], scenario: Scenario) -> Work | None:
    steps = sorted(seconds)
    if name == "update_policy":
        steps = [step for step in steps if step > scenario.critic_warmup_steps]
    if not steps or name == "generate":
        return None
    measured = np.array([seconds[step] for step in steps])
    if name in ("evaluate", "checkpoint"):
        due = np.array([is_due(name, step - 1, scenario) or step == steps[-1] for step in steps])
        usual_s = float(measured[~due].mean()) if not due.all() else 0.0
        return Work(fixed_s=usual_s, update_s=max(float(measured[due].mean()) - usual_s, 0.0))
    if name in _FIXED or name not in _UNITS:
        return Work(fixed_s=float(measured.mean()))
    chosen = [works[step] for step in steps]
    if name == "update_critic":
        tokens, rows = [w.finished_tokens for w in chosen], [w.num_finished for w in chosen]
        size, passes = scenario.critic_minibatch_size, scenario.critic_epochs
    else:
        tokens, rows = [w.row_tokens for w in chosen], [w.num_rows for w in chosen]
        size, passes = scenario.policy_minibatch_size, 1
    if name == "score":
        rows = [w.num_finished for w in chosen]
    found = {
        "token_s": np.array(tokens, dtype=np.float64) * passes,
        "row_s": np.array(rows, dtype=np.float64),
        "update_s": np.ceil(np.array(rows) / size) * passes,
        "fixed_s": np.ones(len(steps)),
    }
    return _fitted({unit: found[unit] for unit in _UNITS[name]}, measured)


def _fitted(units: dict[str, np.ndarray], measured: np.ndarray) -> Work:
    mean = float(measured.mean())
    if mean <= 0:
        return Work()
    matrix = np.stack(list(units.values()), axis=1)
    shares = np.array([_PRIOR[unit] for unit in units])
    shares /= shares.sum()
    prior = np.diag(matrix.mean(axis=0))
    deviation = max(1.4826 * float(np.median(np.abs(measured - np.median(measured)))), 0.02 * mean)
    weights = np.concatenate([np.full(len(measured), deviation**-2), np.full(len(shares), _PRIOR_WEIGHT * mean**-2)])
    found = robust(np.concatenate([matrix, prior]), np.concatenate([measured, shares * mean]), weights)
    # Disturbed steps count little in the shape, but they are part of what steps take on this machine.
    explained = float((matrix @ found).mean())
    found = found * mean / explained if explained > 0 else shares * mean / np.maximum(matrix.mean(axis=0), 1e-300)
    return Work(**dict(zip(units, found.tolist(), strict=True)))


def _between_s(run: RecordedRun, scenario: Scenario) -> float:
    """From the moment a stage could start to its start: what it needs was made, and its resource was free."""
    makers = {product: stage for stage in scenario.graph for product in stage.products}
    spans = {(span.name, span.step): span for span in run.spans}
    busy = {lane: sorted(s.end_s for s in run.spans if s.lane == lane) for lane in ("rollout", "trainer", "host")}
    gaps = []
    for stage in scenario.graph:
        for step in run.steps[1:]:
            span = spans.get((stage.name, step))
            needed = [spans.get((makers[product].name, step - back)) for product, back in stage.waits_for]
            if span is None or not needed or None in needed:
                continue
            ends = [one.end_s for one in needed if one is not None]
            for lane in stage.occupies:
                before = np.searchsorted(busy[lane.value], span.start_s + 1e-6) - 1
                if before >= 0:
                    ends.append(busy[lane.value][before])
            gaps.append(max(span.start_s - max(ends), 0.0))
    return float(np.mean(gaps)) if gaps else 0.0
