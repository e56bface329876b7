"""Fits the costs of a run to the seconds and facts in its timeline.

``server_costs.py`` fits the servers' costs; this module fits the trainer's and the driver's stages: seconds against tokens.
If all steps of a run are alike, fixed costs cannot be separated from costs per token; the cost is then taken as mostly
per token (``_PRIOR``).
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import assert_never

import numpy as np

from megatron_rl.desk.simulate.contention import fit_contention
from megatron_rl.desk.simulate.fitting import mixture
from megatron_rl.desk.simulate.prediction import StepWork, runs_in_step, work_of
from megatron_rl.desk.simulate.recorded_run import RecordedRun, RequestRound
from megatron_rl.desk.simulate.scenario import Scenario
from megatron_rl.desk.simulate.server_costs import all_rows, decode_costs, non_decode_costs, served
from megatron_rl.desk.simulate.slot_simulation import GeneratedStep, trained_rows
from megatron_rl.desk.simulate.timing import LinearCost, Timing
from megatron_rl.errors import UserError
from megatron_rl.schedule.table import GENERATE, OLD_LOGPROBS, ROWS, UPDATE_POLICY, Cost, DeviceWork, row_of

_PRIOR = {"token_s": 0.7, "row_s": 0.15, "fixed_s": 0.15, "update_s": 0.3}
"""Each part's share of a stage's seconds, used if the run cannot separate them."""


def calibrated(run: RecordedRun, scenario: Scenario) -> Timing:
    """Return the run's fitted costs. ``scenario``: the run's own. Raises UserError if the timeline has no facts of its stages."""
    steps = [step for step in run.steps if step in run.rounds]
    if len(steps) > 3:
        steps = steps[1:]  # the first one compiles, loads and fills caches
    if not steps:
        raise UserError(
            f"--run {run.folder}: its timeline does not say what its generate stages did (a run of an earlier version); run "
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
        server_s += np.array([each.seconds for each in served(whole, scenario, timing)])
        rows.append(whole)
    generated = rows[0]
    for more in rows[1:]:
        generated += more
    # A run does not record which responses over-sampling discarded, nor groups, so no response waits for its group.
    trains = replace(scenario, num_slots=scenario.num_trained, facts=replace(scenario.facts, whole_groups=False))
    return GeneratedStep(generated, trained_rows(generated, trains), tuple(server_s.tolist()))


def recorded_work(rounds: Sequence[RequestRound], step: int, scenario: Scenario, timing: Timing) -> StepWork:
    return work_of(recorded_window(rounds, scenario, timing), step)


def _stage_cost(name: str, seconds: dict[int, float], works: dict[int, StepWork], scenario: Scenario) -> LinearCost | None:
    """Return a stage's fitted costs, or None if the run does not determine them; ``server_costs.py`` fits the servers' costs."""
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
