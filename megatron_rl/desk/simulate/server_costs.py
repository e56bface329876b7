"""Fits the servers' costs to a run's recorded rows: decode steps, prefill and the rest of a generate stage.

Decode: requests that travelled together arrived together, so the difference between the ends of two of them is pure
engine time, over a known number of decode steps with known numbers of running responses and known context. Prefill and
the rest: what is left of the stages, against prefixes, requests and tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.desk.simulate.contention import Contention
from megatron_rl.desk.simulate.decoding import ServerTrace, serve, spread
from megatron_rl.desk.simulate.fitting import mixture, robust
from megatron_rl.desk.simulate.recorded_run import RecordedRun, RequestRound
from megatron_rl.desk.simulate.scenario import Scenario
from megatron_rl.desk.simulate.slot_simulation import SlotResponses
from megatron_rl.desk.simulate.timing import Decode, LinearCost, Timing
from megatron_rl.schedule.table import GENERATE

_RATES = (1.0, 0.8, 0.6, 0.4)
_ALIKE = 0.2
"""Relative variation of the prefix tokens over the steps below which they do not determine the cost of a prefill."""
_SEEN = 0.02
"""Share of the decode steps that must have run few responses in order to determine the cost of a step with one."""
_AS_GOOD = 1.05
_REST = {"row_s": 0.4, "token_s": 0.3, "fixed_s": 0.3}
"""Shares of requests, tokens and the stage itself in the remaining seconds, used if the run does not determine them."""


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
    return SlotResponses(one.prompt[place], held, new, total, unknown, unknown, unknown)


def served(rows: SlotResponses, scenario: Scenario, timing: Timing) -> list[ServerTrace]:
    prefix = rows.prompt + rows.held
    return [
        serve(prefix[own], rows.new[own], timing, scenario.limits) for own in spread(len(rows), scenario.num_servers)
    ]


def decode_costs(
    run: RecordedRun, scenario: Scenario, steps: Sequence[int], shared: Contention
) -> tuple[Decode, Contention]:
    """Fit the decode curve, together with the rate at which generation ran while it overlapped the trainer."""
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
    """(prefill, what else generate takes), ``timing`` with the decode curve alone.

    ``forward_s``: the trainer's seconds per token of a forward pass. A server's prefill is taken to be as fast on as many
    devices where the run does not tell it apart from what each request costs.
    """
    alone = shared.alone(run, GENERATE)
    steps = [step for step in run.steps if step in run.rounds][1:] or run.steps
    rest: list[float] = []
    units: dict[str, list[float]] = {name: [] for name in ("prefix", "row_s", "token_s", "fixed_s")}
    for step in steps:
        rows = [all_rows(one) for one in run.rounds[step]]
        decode_s = sum(max((one.seconds for one in served(each, scenario, timing)), default=0.0) for each in rows)
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
    """Return basis timings whose weighted sum is the fitted timing."""
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
    """Return the rows of each HTTP request, ordered by their ends. Sampled rows lack that grouping and form one group."""
    groups = []
    for own in spread(len(rows), scenario.num_servers):
        size = len(own) if sampled else scenario.limits.http_batch
        for first in range(0, len(own), max(size, 1)):
            group = own[first : first + size]
            group = group[(seconds[group] > 0) & (rows.new[group] > 0)]
            # Ordered by tokens first, because equally long rows are interchangeable.
            _, place = np.unique(rows.new[group], return_index=True)
            groups.append(group[place])
    return [group for group in groups if len(group) > 1]


def _finish_s(rows: SlotResponses, scenario: Scenario, timing: Timing) -> np.ndarray:
    finish = np.zeros(len(rows))
    for own, one in zip(spread(len(rows), scenario.num_servers), served(rows, scenario, timing), strict=True):
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
    """Return prior coefficients: a third of a step is fixed, a third per running response and a third per context token."""
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
            [sum(max(s.seconds for s in served(rows, scenario, basis)) for rows in rounds) for basis in bases]
        )
    measured = np.array([alone[step] for step in steps])
    return robust(np.array(features), measured, 1.0 / np.maximum(measured, 1e-9))
