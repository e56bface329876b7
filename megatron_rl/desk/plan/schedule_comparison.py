"""Compares the schedules of a run by their fastest plans: old log-probs, whole responses, modes and slots. Pure.

Each change is tried with the changes that made the plan faster before it, on the best layouts of each division of the GPUs. A key that
was given on the command line is not changed. Time alone is compared: staleness and steps change what a run learns.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_rl.config.derived import needs_critic
from megatron_rl.config.schedule_facts import Overlap, facts_of, overlap_of
from megatron_rl.config.schema import Config, Mode, OldPolicy, RoutingReplay
from megatron_rl.desk.plan.plan_ranking import PlanRanking, RankedPlan, usual_windows

_PER_SPLIT = 2
"""Layouts kept of each division of the GPUs and server size."""
MODE, OLD_POLICY, TRAINS_ON = "schedule.mode", "algorithm.correction.old_policy", "schedule.training_window_tokens"
SLOTS = "batch.num_prompts_per_step"


@dataclass(frozen=True)
class ComparedSchedule:
    """A changed schedule with its fastest plan."""

    text: str
    """Changed keys as key=value."""
    plan: RankedPlan


@dataclass(frozen=True)
class _Change:
    key: str
    value: str
    make: Callable[[Config], Config]


def compare_schedules(
    ranking: PlanRanking, layouts: Sequence[Config], chosen: RankedPlan, given: Collection[str]
) -> list[ComparedSchedule]:
    """Return the tried schedules in the order of trial; ``layouts``: best first, as from ``PlanRanking.by_bound``."""
    best, found = chosen, []
    taken: dict[str, str] = {}
    config, kept = ranking.config, _narrowed(layouts)
    for change in _changes(config, given):
        tried = change.make(config)
        if tried == config or not _is_valid(tried):
            continue
        plans = _ranked(ranking, tried, kept)
        if not plans:
            continue
        words = {**taken, change.key: change.value}
        found.append(ComparedSchedule(" ".join(f"{key}={value}" for key, value in words.items()), plans[0]))
        if plans[0].response_s < best.response_s:
            best, config, taken = plans[0], tried, words
    return found


def _changes(config: Config, given: Collection[str]) -> Iterator[_Change]:
    whole = _Change(TRAINS_ON, "0", _with_whole_responses)
    changes = [_Change(OLD_POLICY, OldPolicy.rollout.value, _without_old_pass), whole]
    changes += [_Change(MODE, mode.value, partial(_with_mode, mode)) for mode in Mode]
    doubled = 2 * config.batch.num_prompts_per_step
    changes += [whole, _Change(SLOTS, str(doubled), partial(_with_prompts, doubled))]
    yield from (change for change in changes if change.key not in given)


def _without_old_pass(config: Config) -> Config:
    correction = replace(config.algorithm.correction, old_policy=OldPolicy.rollout)
    return replace(config, algorithm=replace(config.algorithm, correction=correction))


def _with_whole_responses(config: Config) -> Config:
    windows = overlap_of(config.schedule) > Overlap.nothing
    changed = replace(config, schedule=replace(config.schedule, training_window_tokens=0))
    return changed if windows and not facts_of(config).whole_responses else config


def _with_mode(mode: Mode, config: Config) -> Config:
    return replace(config, schedule=replace(config.schedule, mode=mode))


def _with_prompts(number: int, config: Config) -> Config:
    return replace(config, batch=replace(config.batch, num_prompts_per_step=number))


def _is_valid(config: Config) -> bool:
    """True if the checks of a configuration accept the changed keys together."""
    correction, facts = config.algorithm.correction, facts_of(config)
    records = config.policy.moe.routing_replay is RoutingReplay.R2
    is_old = facts.whole_responses and facts.windows and needs_critic(config)
    from_rollout = correction.old_policy is OldPolicy.rollout
    return not (from_rollout and records) and (not is_old or from_rollout or correction.weight != "none")


def _narrowed(layouts: Sequence[Config]) -> list[Config]:
    """Return the first layouts of each division of the GPUs and server size."""
    kept: dict[tuple[object, ...], list[Config]] = {}
    for config in layouts:
        place = (config.rollout.placement, config.parallel.num_ranks, config.rollout.tensor_parallel_size)
        same = kept.setdefault(place, [])
        if len(same) < _PER_SPLIT and all(config.parallel != other.parallel for other in same):
            same.append(config)
    return [config for same in kept.values() for config in same]


def _ranked(ranking: PlanRanking, config: Config, layouts: Sequence[Config]) -> list[RankedPlan]:
    """Return the fastest plan of ``config`` on the given layouts; none if its mode forbids the placement of all."""
    ahead = facts_of(config).ahead
    placed = [_on_layout(config, one) for one in layouts if not (ahead and facts_of(one).colocated)]
    windows = list(ranking.windows) if any(ranking.windows) else usual_windows(config)
    windows = windows if overlap_of(config.schedule) > Overlap.nothing else [0]
    other = replace(ranking, config=config, windows=windows)
    return other.rank(other.by_bound(((one,), ()) for one in placed), 1, more=1)


def _on_layout(config: Config, layout: Config) -> Config:
    batch = replace(config.batch, max_tokens_per_microbatch=layout.batch.max_tokens_per_microbatch)
    return replace(
        config, parallel=layout.parallel, rollout=layout.rollout, policy=layout.policy, critic=layout.critic, batch=batch
    )
