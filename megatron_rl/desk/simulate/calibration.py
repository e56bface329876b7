"""Fits the costs of a run to the seconds and facts in its timeline.

Trainer and driver: a stage's seconds against tokens. If all steps of a run are alike, fixed costs cannot be separated from costs per
token; the cost is then taken as mostly per token (``_PRIOR``).

Decode: requests of one HTTP batch arrive together, so the difference between the ends of two of them is pure server time, over a
known number of decode steps with known numbers of running responses and known context. Prefill and the rest of a generate stage:
the remaining seconds against prefixes, requests and tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import assert_never

import numpy as np

from megatron_rl.desk.simulate.contention import Contention, fit_contention
from megatron_rl.desk.simulate.decoding import spread
from megatron_rl.desk.simulate.fitting import mixture, robust
from megatron_rl.desk.simulate.prediction import StepWork, runs_in_step, work_of
from megatron_rl.desk.simulate.recorded_run import RecordedRun, RequestRound
from megatron_rl.desk.simulate.scenario import Scenario
from megatron_rl.desk.simulate.slot_simulation import GeneratedStep, SlotResponses, serve_rows, trained_rows
from megatron_rl.desk.simulate.timing import Decode, LinearCost, Timing
from megatron_rl.errors import UserError
from megatron_rl.schedule.table import GENERATE, OLD_LOGPROBS, ROWS, UPDATE_POLICY, Cost, DeviceWork, row_of

_RATES = (1.0, 0.8, 0.6, 0.4)
_ALIKE = 0.2
"""Relative variation of the prefix tokens over the steps; below it, they do not determine the cost of a prefill."""
_SEEN = 0.02
"""Share of the decode steps that must have run few responses in order to determine the cost of a step with one."""
_AS_GOOD = 1.05
_REST = {"row_s": 0.4, "token_s": 0.3, "fixed_s": 0.3}
"""Shares of requests, tokens and the stage itself in the remaining seconds, used if the run does not determine them."""
_PRIOR = {"token_s": 0.7, "row_s": 0.15, "fixed_s": 0.15, "update_s": 0.3}
"""Each part's share of a stage's seconds, used if the run cannot separate them."""


def calibrated(run: RecordedRun, scenario: Scenario) -> Timing:
    """Return the run's fitted costs. ``scenario``: the run's own. Raises UserError if the timeline has no facts about its stages."""
    steps = [step for step in run.steps if step in run.rounds]
    if len(steps) > 3:
        steps = steps[1:]  # the first one compiles, loads and fills caches
    if not steps:
        raise UserError(
            f"--run {run.folder}: its timeline lacks the requests of its generate stages (a run of an earlier version); run "
            "it again for a few steps, replay it with --replay, or give --timing and --lengths"
        )
    decode, shared = decode_costs(run, scenario, steps, fit_contention(run, steps, scenario.num_servers))
    timing = Timing(decode=decode, cores=shared.cores, overlap_rate=shared.overlap_rate)
    works = {step: recorded_work(run.rounds[step], step, scenario, timing) for step in steps}
    stages, cores = {}, shared.stage_cores(run)
    for stage in scenario.graph:
        seconds = {step: s for step, s in shared.alone(run, stage.name).items() if step in works}
        cost = _stage_cost(stage.name, seconds, works, scenario)
        if cost is not None:
            stages[stage.name] = replace(cost, cores=cores.get(stage.name, 0.0))
    # A process reward model may be of another size.
    passes = [row.name for row in ROWS if row.work is DeviceWork.forward and row.model != "process"]
    forward_s = max((stages[name].token_s for name in passes if name in stages), default=0.0)
    if OLD_LOGPROBS not in stages and UPDATE_POLICY in stages:
        # The pass never ran, so its seconds come from the update: forward and backward cost three forward passes.
        update = stages[UPDATE_POLICY]
        stages[OLD_LOGPROBS] = replace(update, token_s=update.token_s / 3, update_s=0.0)
    prefill, rest = non_decode_costs(run, scenario, timing, shared, forward_s)
    stages[GENERATE] = replace(rest, cores=cores.get(GENERATE, 0.0))
    return replace(timing, prefill=prefill, stages=stages, between_s=_between_s(run, scenario))


def recorded_window(rounds: Sequence[RequestRound], scenario: Scenario, timing: Timing) -> GeneratedStep:
    """Return the responses of a recorded generate stage, with its servers' seconds under ``timing``."""
    rows, server_s = [], np.zeros(scenario.num_servers)
    for one in rounds:
        whole = all_rows(one)
        server_s += np.array([each.seconds for each in serve_rows(whole, scenario, timing)])
        rows.append(whole)
    generated = rows[0]
    for more in rows[1:]:
        generated += more
    # A run does not record which responses over-sampling discarded, nor groups, so no response waits for its group.
    trains = replace(scenario, num_slots=scenario.num_trained, facts=replace(scenario.facts, whole_groups=False))
    trained = trained_rows(with_trained(generated, scenario), trains)
    return GeneratedStep(generated, trained, tuple(server_s.tolist()))


def with_trained(rows: SlotResponses, scenario: Scenario) -> SlotResponses:
    """Add the tokens that had trained before a recorded step, if all windows but the first ones were full."""
    window, facts = scenario.window_tokens, scenario.facts
    num_windows = -(-rows.held // window)
    pending = num_windows if facts.whole_responses else num_windows % ceil(facts.training_window_tokens / window)
    first_window = np.where(rows.held > 0, rows.held - (num_windows - 1) * window, window)
    return replace(rows, first_window=first_window, trained=np.maximum(rows.held - pending * window, 0))


def recorded_work(rounds: Sequence[RequestRound], step: int, scenario: Scenario, timing: Timing) -> StepWork:
    return work_of(recorded_window(rounds, scenario, timing), step)


def _stage_cost(name: str, seconds: dict[int, float], works: dict[int, StepWork], scenario: Scenario) -> LinearCost | None:
    """Return a stage's fitted costs, or None if the run does not determine them."""
    cost, steps = row_of(name).cost, sorted(seconds)
    first = scenario.critic_warmup_steps + 1 if cost is Cost.policy_updates else 0
    steps = [step for step in steps if step >= first]
    if not steps:
        return None
    measured = np.array([seconds[step] for step in steps])
    chosen = [works[step] for step in steps]
    match cost:
        case Cost.generation:
            return None
        case Cost.evaluations | Cost.checkpoints:
            return _due_cost(measured, np.array([runs_in_step(name, step - 1, scenario) or step == steps[-1] for step in steps]))
        case Cost.publish | Cost.fixed:
            return LinearCost(fixed_s=float(measured.mean()))
        case Cost.batch:
            return _fitted(measured, token_s=[work.row_tokens for work in chosen], fixed_s=[1] * len(steps))
        case Cost.old_logprobs:
            shares = [scenario.stale_fraction(work.num_rows, step - 1) for step, work in zip(steps, chosen, strict=True)]
            tokens = [work.row_tokens * share for work, share in zip(chosen, shares, strict=True)]
            return _fitted(measured, token_s=tokens, fixed_s=[1] * len(steps)) if any(shares) else None
        case Cost.finished:
            return _fitted(measured, row_s=[work.num_finished for work in chosen], fixed_s=[1] * len(steps))
        case Cost.policy_updates:
            updates = [ceil(work.num_rows / scenario.policy_minibatch_size) for work in chosen]
            return _fitted(measured, token_s=[work.row_tokens for work in chosen], update_s=updates)
        case Cost.critic_updates:
            epochs, size = scenario.critic_epochs, scenario.critic_minibatch_size
            updates = [epochs * ceil(work.num_finished / size) for work in chosen]
            return _fitted(measured, token_s=[epochs * work.finished_tokens for work in chosen], update_s=updates)
        case other:
            assert_never(other)


def _due_cost(measured: np.ndarray, due: np.ndarray) -> LinearCost:
    usual_s = float(measured[~due].mean()) if not due.all() else 0.0
    return LinearCost(fixed_s=usual_s, update_s=max(float(measured[due].mean()) - usual_s, 0.0))


def _fitted(measured: np.ndarray, **amounts: Sequence[float]) -> LinearCost:
    """Fit the ``measured`` seconds of each step to the ``amounts`` of each unit in that step."""
    units = {unit: np.array(amount, dtype=np.float64) for unit, amount in amounts.items()}
    mean = float(measured.mean())
    if mean <= 0:
        return LinearCost()
    whole = sum(_PRIOR[unit] for unit in units)
    return LinearCost(**mixture(units, measured, {unit: mean * _PRIOR[unit] / whole for unit in units}))


def _between_s(run: RecordedRun, scenario: Scenario) -> float:
    """Return the seconds from the moment a stage could start (needs made, resource free) to its start."""
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


@dataclass(frozen=True)
class _Ends:
    """Differences between ends of responses that arrived together; one entry per difference."""

    features: np.ndarray
    """[differences, bases] seconds of each basis between the two ends."""
    starts_s: np.ndarray
    ends_s: np.ndarray
    """Unix times of the later ends."""
    nodes: tuple[float, ...]
    """Numbers of running responses at the nodes of the decode curve."""


def all_rows(one: RequestRound) -> SlotResponses:
    """Return all rows of a round: a sampled row is repeated for the rows that it represents."""
    place = _places(one)
    held, new = one.held[place], one.new[place]
    total = held + new + np.where(one.ended[place], 0, 1)
    unknown = np.zeros_like(new)
    return SlotResponses(one.prompt[place], held, new, total, unknown, unknown, unknown, unknown, np.zeros(len(new)))


def decode_costs(
    run: RecordedRun, scenario: Scenario, steps: Sequence[int], shared: Contention
) -> tuple[Decode, Contention]:
    """Fit the decode curve and the rate of generation while it overlaps the trainer; returns ``shared`` with this rate."""
    most = max(one.num_rows for step in steps for one in run.rounds[step]) / scenario.num_servers
    nodes = (*(4**i for i in range(12) if 4**i < 0.7 * most), max(int(np.ceil(most)), 1))
    bases = _bases(nodes)
    ends = _ends(run, scenario, steps, bases)
    if ends is None:
        return _decode(nodes, _from_totals(run, scenario, steps, (bases, shared))), shared
    rates = [shared.rate, *_RATES] if shared.overlaps else [shared.rate]
    fits = [(*_fit(ends, replace(shared, rate=rate)), rate) for rate in rates]
    # Among rates that explain the rows about as well as the best one, choose the rate that fits the CPU seconds.
    good = [fit for fit in fits if fit[0] <= _AS_GOOD * min(fits, key=lambda fit: fit[0])[0]]
    _, found, rate = min(good, key=lambda fit: abs(fit[2] - shared.rate))
    return _decode(nodes, found), replace(shared, rate=rate)


def non_decode_costs(
    run: RecordedRun, scenario: Scenario, timing: Timing, shared: Contention, forward_s: float
) -> tuple[LinearCost, LinearCost]:
    """Return the costs of (prefill, the rest of a generate stage). ``timing`` has only the decode curve.

    ``forward_s``: the trainer's seconds per token of a forward pass. If the run cannot separate prefill from the cost of a
    request, prefill is assumed to be as fast as that pass on the same number of devices.
    """
    alone = shared.alone(run, GENERATE)
    steps = [step for step in run.steps if step in run.rounds][1:] or run.steps
    rest: list[float] = []
    units: dict[str, list[float]] = {name: [] for name in ("prefix", "row_s", "token_s", "fixed_s")}
    for step in steps:
        rows = [all_rows(one) for one in run.rounds[step]]
        decode_s = sum(max((one.seconds for one in serve_rows(each, scenario, timing)), default=0.0) for each in rows)
        rest.append(alone[step] - decode_s)
        sent = [each.pick(np.flatnonzero(each.new > 0)) for each in rows]
        units["prefix"].append(sum(float((each.prompt + each.held).sum()) for each in sent) / scenario.num_servers)
        units["row_s"].append(sum(map(len, sent)))
        units["token_s"].append(sum(float(each.new.sum()) for each in sent))
        units["fixed_s"].append(1.0)
    measured = np.array(rest)
    if measured.mean() <= 0:
        return LinearCost(), LinearCost()
    columns = {name: np.array(values, dtype=np.float64) for name, values in units.items()}
    prefill_s = min(forward_s * scenario.ranks_per_server * columns["prefix"].mean(), 0.8 * measured.mean())
    if columns["prefix"].std() < _ALIKE * columns["prefix"].mean():
        prefill = LinearCost(token_s=prefill_s / columns.pop("prefix").mean())
        left = {name: share * (measured.mean() - prefill_s) for name, share in _REST.items()}
        return prefill, LinearCost(**mixture(columns, measured - prefill_s, left))
    prior = {"prefix": prefill_s} | {name: share * (measured.mean() - prefill_s) for name, share in _REST.items()}
    found = mixture(columns, measured, prior)
    return LinearCost(token_s=found.pop("prefix")), LinearCost(**found)


def _places(one: RequestRound) -> np.ndarray:
    return np.arange(one.num_rows) * len(one.new) // max(one.num_rows, 1)


def _bases(nodes: Sequence[int]) -> list[Timing]:
    """Return timings whose weighted sum is the fitted timing."""
    floats = tuple(map(float, nodes))
    rising = [Decode(floats, tuple(float(i >= j) for i in range(len(nodes)))) for j in range(len(nodes))]
    return [*(Timing(decode=one) for one in rising), Timing(decode=Decode((1.0,), (0.0,), context_token_s=1.0))]


def _decode(nodes: Sequence[int], found: np.ndarray) -> Decode:
    return Decode(tuple(map(float, nodes)), tuple(np.cumsum(found[:-1]).tolist()), float(found[-1]))


def _ends(run: RecordedRun, scenario: Scenario, steps: Sequence[int], bases: Sequence[Timing]) -> _Ends | None:
    """Collect the differences between ends; None if the servers did not report their seconds."""
    features, starts, ends = [], [], []
    spans = run.by_name(GENERATE)
    for step in steps:
        if len(run.rounds[step]) > 1:
            continue  # the border between two rounds is not recorded
        (one,) = run.rounds[step]
        rows, seconds = all_rows(one), one.seconds[_places(one)]
        finish = np.stack([_finish_s(rows, scenario, basis) for basis in bases], axis=1)
        # Half of the stage's seconds beyond its longest request are assumed to pass before the requests arrive.
        span = spans[step]
        begin_s = span.start_s + max(span.end_s - span.start_s - seconds.max(), 0.0) / 2
        for group in _arrived_together(rows, seconds, scenario, sampled=len(one.new) < one.num_rows):
            features.append(np.diff(finish[group], axis=0))
            starts.append(begin_s + seconds[group][:-1])
            ends.append(begin_s + seconds[group][1:])
    if not features or not sum(map(len, features)):
        return None
    return _Ends(np.concatenate(features), np.concatenate(starts), np.concatenate(ends), bases[0].decode.running)


def _arrived_together(rows: SlotResponses, seconds: np.ndarray, scenario: Scenario, *, sampled: bool) -> list[np.ndarray]:
    """Return the indices of each HTTP request's rows, ordered by length, for differences between their ends.

    Rows without tokens or seconds, all but one of equally long rows, and requests with a single row left are omitted.
    Sampled rows do not tell their requests: all rows of a server form one group.
    """
    groups = []
    for own in spread(len(rows), scenario.num_servers):
        size = len(own) if sampled else scenario.limits.http_batch
        for first in range(0, len(own), max(size, 1)):
            group = own[first : first + size]
            group = group[(seconds[group] > 0) & (rows.new[group] > 0)]
            # Ordered by tokens; one of equally long rows is enough, because they are interchangeable.
            _, place = np.unique(rows.new[group], return_index=True)
            groups.append(group[place])
    return [group for group in groups if len(group) > 1]


def _finish_s(rows: SlotResponses, scenario: Scenario, timing: Timing) -> np.ndarray:
    finish = np.zeros(len(rows))
    for own, one in zip(spread(len(rows), scenario.num_servers), serve_rows(rows, scenario, timing), strict=True):
        finish[own] = one.finish_s
    return finish


def _fit(ends: _Ends, shared: Contention) -> tuple[float, np.ndarray]:
    """Return (mean error as a share of the measured seconds, coefficients)."""
    measured = ends.ends_s - ends.starts_s
    alone = shared.undisturbed(ends.starts_s, ends.ends_s)
    # Noise grows with the decode steps between two ends.
    weights = 1.0 / np.maximum(ends.features[:, 0], 1.0)
    expected = _expected(ends.features, float(alone.sum()), ends.nodes)
    steps, few = ends.features[:, 0], ends.features[:, 0] - ends.features[:, 1]
    if few.sum() > _SEEN * steps.sum() or len(ends.nodes) == 1:
        found = robust(ends.features, alone, weights, expected=expected)
    else:  # small batches never ran, so the rows do not determine the fixed cost of a step
        rest = alone - expected[0] * steps
        found = np.concatenate([expected[:1], robust(ends.features[:, 1:], rest, weights, expected=expected[1:])])
    # Outlier steps count little in the shape, but they are part of the steps' mean time on this node.
    found = found * alone.sum() / max(float((ends.features @ found).sum()), 1e-12)
    # Relative to measured seconds, because otherwise the slowest rate, which leaves the fewest seconds, would always win.
    slowed = np.where(alone > 0, measured / np.maximum(alone, 1e-9), 1.0)
    return float(np.abs((ends.features @ found - alone) * slowed).sum() / measured.sum()), found


def _expected(features: np.ndarray, seconds: float, nodes: tuple[float, ...]) -> np.ndarray:
    """Return prior coefficients [features]: of ``seconds``, a third is fixed per decode step, a third proportional to the running
    responses (a slope between ``nodes``) and a third to the context tokens."""
    rises = np.diff(nodes)
    steps, context = features[:, 0].sum(), features[:, -1].sum()
    per_response = seconds / 3 / max(float((features[:, 1:-1] * rises).sum()), 1e-12)
    return np.array([seconds / 3 / max(steps, 1e-12), *(per_response * rises), seconds / 3 / max(context, 1e-12)])


def _from_totals(
    run: RecordedRun, scenario: Scenario, steps: Sequence[int], known: tuple[Sequence[Timing], Contention]
) -> np.ndarray:
    """Fit to the seconds of whole stages, if the run has no finer data."""
    bases, shared = known
    alone = shared.alone(run, GENERATE)
    features = []
    for step in steps:
        rounds = [all_rows(one) for one in run.rounds[step]]
        features.append(
            [sum(max(s.seconds for s in serve_rows(rows, scenario, basis)) for rows in rounds) for basis in bases]
        )
    measured = np.array([alone[step] for step in steps])
    return robust(np.array(features), measured, 1.0 / np.maximum(measured, 1e-9))
