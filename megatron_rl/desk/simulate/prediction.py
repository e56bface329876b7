"""Predicts a run's steps on a simulated clock, and their means. Pure, and deterministic given a seed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import ceil
from typing import assert_never

import numpy as np

from megatron_rl.config.derived import is_due
from megatron_rl.desk.simulate.clock import StageLoad, run_clock
from megatron_rl.desk.simulate.lengths import LengthDistribution
from megatron_rl.desk.simulate.scenario import Scenario
from megatron_rl.desk.simulate.slot_simulation import GeneratedStep, SlotProcess, SlotResponses, ToolWaits
from megatron_rl.desk.simulate.timing import Timing
from megatron_rl.schedule.graph import StageRun
from megatron_rl.schedule.table import GENERATE, LAST, Cost, row_of
from megatron_rl.tracking.timeline import Span


@dataclass(frozen=True)
class Workload:
    """The lengths of responses and prompts, and the calls of the environment."""

    lengths: LengthDistribution
    """Distribution of response lengths."""
    prompts: LengthDistribution
    waits: ToolWaits | None = None
    """Calls of the environment; None: no response waits."""


@dataclass(frozen=True)
class StepWork:
    """A step's amounts of work, from which costs and tables are computed."""

    server_s: tuple[float, ...]
    """Seconds of decode and prefill of each server, increasing."""
    num_requests: int
    new_tokens: int
    prefill_tokens: int
    carried_tokens: int
    """Prefilled tokens that earlier steps generated."""
    num_rows: int
    row_tokens: int
    row_squares: float
    num_finished: int
    finished_tokens: int
    """Tokens of finished rows: prompt and response."""
    finished_squares: float
    finished_new_tokens: int
    """New tokens in rows that have ended."""
    trained_tokens: int
    """Tokens of the rows that train the policy."""
    prompt_tokens: int
    """Prompt tokens of the rows."""
    oldest_age: int
    """Versions between the oldest token of a finished response and the critic's pass over it; the policy's without a critic."""


def work_of(window: GeneratedStep, step: int) -> StepWork:
    done, rows = window.generated, window.trained
    ended = rows.pick(np.flatnonzero(rows.ended))
    finished = ended if window.finished is None else window.finished
    sent = done.pick(np.flatnonzero(done.new > 0))
    return StepWork(
        server_s=tuple(sorted(window.server_s)),
        num_requests=len(sent),
        new_tokens=int(done.new.sum()),
        prefill_tokens=int((sent.prompt + sent.held).sum()),
        carried_tokens=int(sent.held.sum()),
        num_rows=len(rows),
        row_tokens=int(rows.row_tokens.sum()),
        row_squares=_squares(rows),
        num_finished=len(finished),
        finished_tokens=int(finished.row_tokens.sum()),
        finished_squares=_squares(finished),
        finished_new_tokens=int(ended.new.sum()),
        trained_tokens=int(rows.new.sum()),
        prompt_tokens=int(rows.prompt.sum()),
        oldest_age=int((step - ended.born).max()) if len(ended) else 0,
    )


def stage_seconds(
    name: str, work: StepWork, step: int, scenario: Scenario, timing: Timing, *, last: bool = False
) -> float:
    """Return a stage's seconds without contention. ``last``: the run's last step, which ends with a checkpoint and an evaluation."""
    cost = timing.stage(name)
    rows = {"tokens": work.row_tokens, "squares": work.row_squares, "rows": work.num_rows}
    finished = {"tokens": work.finished_tokens, "squares": work.finished_squares, "rows": work.num_finished}
    policy_rests = step < scenario.critic_warmup_steps
    match row_of(name).cost:
        case Cost.generation:
            return max(work.server_s) + cost.seconds(tokens=work.new_tokens, rows=work.num_requests)
        case Cost.batch:
            return cost.seconds(**rows)
        case Cost.old_logprobs:
            share = scenario.stale_fraction(work.num_rows, step)
            return cost.seconds(**{unit: number * share for unit, number in rows.items()}) if share else 0.0
        case Cost.finished:
            return cost.seconds(**finished)
        case Cost.policy_updates:
            updates = ceil(work.num_rows / scenario.policy_minibatch_size)
            return 0.0 if policy_rests else cost.seconds(**rows, updates=updates)
        case Cost.critic_updates:
            updates = ceil(work.num_finished / scenario.critic_minibatch_size)
            return scenario.critic_epochs * cost.seconds(**finished, updates=updates) if updates else 0.0
        case Cost.publish:
            return 0.0 if policy_rests else cost.fixed_s
        case Cost.evaluations | Cost.checkpoints:
            return cost.seconds(updates=last or runs_in_step(name, step, scenario))
        case Cost.fixed:
            return cost.fixed_s
        case other:
            assert_never(other)


def stage_load(name: str, work: StepWork, step: int, scenario: Scenario, timing: Timing, *, last: bool = False) -> StageLoad:
    """Return ``stage_seconds`` with the cores that the stage uses; generate uses fewer as servers finish one at a time."""
    seconds, cores = stage_seconds(name, work, step, scenario, timing, last=last), timing.stage(name).cores
    if name != GENERATE:
        return StageLoad(seconds, cores)
    load, times = None, (0.0, *work.server_s)
    for index in range(len(times) - 1, 0, -1):
        load = StageLoad(times[index] - times[index - 1], cores * (len(times) - index), load)
    return StageLoad(seconds - times[-1], cores, load)


def runs_in_step(name: str, step: int, scenario: Scenario) -> bool:
    """True if the stage runs in a step: an evaluation or a checkpoint only when due."""
    every = scenario.eval_every_steps if row_of(name).cost is Cost.evaluations else scenario.save_every_steps
    return is_due(step + 1, every)


def _squares(rows: SlotResponses) -> float:
    return float((rows.row_tokens.astype(np.float64) ** 2).sum())


@dataclass(frozen=True)
class Prediction:
    """The simulated steps of a scenario."""

    scenario: Scenario
    spans: Sequence[Span]
    works: Sequence[StepWork]
    first: int
    """The first step that counts, after the mix of the slots has become stationary."""

    @property
    def ends_s(self) -> np.ndarray:
        """[steps] time in seconds at which each step was recorded."""
        return np.array([span.end_s for span in self.spans if span.name == LAST])

    @property
    def step_s(self) -> np.ndarray:
        return np.diff(self.ends_s, prepend=0.0)


def predict(
    scenario: Scenario, workload: Workload, timing: Timing, *, num_steps: int, seed: int, first: int | None = None
) -> Prediction:
    """Simulate ``num_steps`` steps; means include those from ``first``, by default from ``scenario.num_settling_steps``."""
    works = simulated_works(scenario, workload, timing, num_steps=num_steps, seed=seed)
    return on_clock(scenario, works, timing, first=first)


def simulated_works(
    scenario: Scenario, workload: Workload, timing: Timing, *, num_steps: int, seed: int
) -> list[StepWork]:
    """Return the work of each step, which in no mode depends on the seconds of other stages."""
    rng = np.random.default_rng(seed)
    slots = SlotProcess(scenario, workload.lengths.draw, workload.prompts.draw, rng, workload.waits)
    return [work_of(slots.generate(step, timing), step) for step in range(num_steps)]


def on_clock(scenario: Scenario, works: Sequence[StepWork], timing: Timing, *, first: int | None = None) -> Prediction:
    def load_of(run: StageRun) -> StageLoad:
        # A simulated run continues after its last step, so that step is not treated as the last one.
        return stage_load(run.stage.name, works[run.step], run.step, scenario, timing)

    spans = run_clock(scenario.graph, load_of, len(works), **timing.sharing)
    settled = min(scenario.num_settling_steps, len(works) - 1) if first is None else first
    return Prediction(scenario, spans, works, settled)


@dataclass(frozen=True)
class PredictedMeans:
    """Means over the steps that count."""

    num_steps: int
    step_s: float
    stage_s: dict[str, float] = field(default_factory=dict)
    """Seconds from start to end, per step."""
    rollout_idle: float = 0.0
    trainer_idle: float = 0.0
    """Share of the time in which the trainer is idle."""
    finished_per_s: float = 0.0
    tokens_per_s: float = 0.0
    """Generated tokens per second."""
    unfinished_share: float = 0.0
    """Share of the trained tokens in windows of unfinished responses."""
    prefix_share: float = 0.0
    """Share of the tokens in the policy's passes that belong to earlier windows."""
    reprefilled_per_step: float = 0.0
    oldest_age: int = 0


def mean_outcome(outcomes: Sequence[PredictedMeans]) -> PredictedMeans:
    """Return the mean of predictions that differ only by their seed."""
    first = outcomes[0]
    numbers = {item.name: getattr(first, item.name) for item in fields(PredictedMeans)}
    for name, value in numbers.items():
        if isinstance(value, float):
            numbers[name] = float(np.mean([getattr(one, name) for one in outcomes]))
    stages = {name: float(np.mean([one.stage_s[name] for one in outcomes])) for name in first.stage_s}
    return PredictedMeans(**{**numbers, "stage_s": stages, "oldest_age": max(one.oldest_age for one in outcomes)})


def compute_means(prediction: Prediction) -> PredictedMeans:
    first, ends = prediction.first, prediction.ends_s
    begin_s, end_s = float(ends[first - 1]) if first else 0.0, float(ends[-1])
    works, count = prediction.works[first:], len(ends) - first
    wall_s = end_s - begin_s
    counted = [span for span in prediction.spans if first < span.step]
    stage_s = {stage.name: 0.0 for stage in prediction.scenario.graph}
    for span in counted:
        stage_s[span.name] += (span.end_s - span.start_s) / count

    # What overlaps the last step belongs to a step that does not exist.
    whole_s = float(ends[-2]) if count > 1 else end_s

    def idle(lane: str) -> float:
        busy = sum(
            max(min(span.end_s, whole_s) - max(span.start_s, begin_s), 0.0)
            for span in prediction.spans
            if span.lane == lane
        )
        return max(1 - busy / (whole_s - begin_s), 0.0)

    def total(name: str) -> float:
        return float(sum(getattr(work, name) for work in works))

    rows = max(total("row_tokens"), 1.0)
    return PredictedMeans(
        num_steps=count,
        step_s=wall_s / count,
        stage_s=stage_s,
        rollout_idle=idle("rollout"),
        trainer_idle=idle("trainer"),
        finished_per_s=total("num_finished") / wall_s,
        tokens_per_s=total("new_tokens") / wall_s,
        unfinished_share=1 - total("finished_new_tokens") / max(total("trained_tokens"), 1.0),
        prefix_share=(rows - total("trained_tokens") - total("prompt_tokens")) / rows,
        reprefilled_per_step=total("carried_tokens") / count,
        # A window that is generated ahead is one version old when it trains.
        oldest_age=max((work.oldest_age + prediction.scenario.facts.ahead for work in works), default=0),
    )


def seconds_until(prediction: Prediction, *, tokens: float = 0.0, responses: float = 0.0) -> float:
    """Return seconds from the start of the first step, extrapolated at the rate of the steps that count."""
    name, target = ("new_tokens", tokens) if tokens else ("num_finished", responses)
    made = np.cumsum([getattr(work, name) for work in prediction.works])
    ends = prediction.ends_s
    if made[-1] >= target:
        return float(np.interp(target, np.concatenate([[0], made]), np.concatenate([[0.0], ends])))
    outcome = compute_means(prediction)
    rate = outcome.tokens_per_s if tokens else outcome.finished_per_s
    return float(ends[-1] + (target - made[-1]) / rate) if rate else float("inf")
