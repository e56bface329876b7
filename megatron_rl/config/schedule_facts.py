"""The facts that a configuration's schedule comes to, derived once: everything outside this file reads facts in place of the mode."""

from dataclasses import dataclass
from enum import IntEnum
from typing import assert_never

from megatron_rl.config.derived import effective_window_tokens, needs_critic, needs_reference, server_placement
from megatron_rl.config.schema import (
    Config,
    KlPlace,
    Mode,
    OldPolicy,
    RoutingReplay,
    ScheduleConfig,
    TrainsOn,
    WeightUpdate,
)


class Overlap(IntEnum):
    """The work that runs while the servers generate the next window; each member includes the ones before it."""

    nothing = 0
    critic = 1
    """The critic's update."""
    training = 2
    """All of training."""
    publish = 3
    """Training, and the publish of its weights."""


@dataclass(frozen=True)
class Facts:
    """The schedule of a run, and the models that it has besides the policy."""

    overlap: Overlap = Overlap.critic
    colocated: bool = False
    """Servers and trainer share devices, and use them in turns."""
    critic: bool = True
    reference: bool = False
    process_rewards: bool = False
    whole_responses: bool = False
    """The policy trains on responses that have ended, over all their windows."""
    whole_groups: bool = False
    """The responses to a prompt train together, in the step in which the last one ends."""

    @property
    def windows(self) -> bool:
        """A response may continue in the next step; without windows each step generates full responses."""
        return self.overlap > Overlap.nothing

    @property
    def ahead(self) -> int:
        """Steps between generation and training, so also the policy updates that a window's weights are behind."""
        return int(self.overlap >= Overlap.training)

    @property
    def in_flight(self) -> bool:
        """New weights reach the servers while they generate a window."""
        return self.overlap >= Overlap.publish

    @property
    def alternates(self) -> bool:
        """Servers and trainer never work at the same time."""
        return self.colocated or self.overlap is Overlap.nothing

    def trained_window(self, step: int) -> int | None:
        """The step whose tokens ``step`` trains on; None: whole responses, over all their windows."""
        return None if self.whole_responses else step


def overlap_of(schedule: ScheduleConfig) -> Overlap:
    """The meaning of a mode. No other function compares modes: a new one fails the type checker here until it has a meaning."""
    match schedule.mode:
        case Mode.sync:
            return Overlap.nothing
        case Mode.tppo:
            return Overlap.critic
        case Mode.async_:
            if schedule.max_staleness <= 0:
                return Overlap.critic
            return Overlap.publish if schedule.weight_update is WeightUpdate.in_flight else Overlap.training
        case _:
            assert_never(schedule.mode)


def why_not_ahead(schedule: ScheduleConfig) -> str:
    """The key, with its value, because of which no window is generated while the trainer trains."""
    return f"max_staleness={schedule.max_staleness}" if schedule.mode is Mode.async_ else f"mode={schedule.mode.value}"


def facts_of(config: Config) -> Facts:
    overlap, critic = overlap_of(config.schedule), needs_critic(config)
    whole_groups = overlap > Overlap.nothing and not critic
    return Facts(
        overlap=overlap,
        colocated=server_placement(config.rollout).shares_devices,
        critic=critic,
        reference=needs_reference(config),
        process_rewards=bool(config.reward.process.path),
        whole_responses=whole_groups or config.schedule.policy_trains_on is TrainsOn.responses,
        whole_groups=whole_groups,
    )


def placement_problem(config: Config) -> str:
    """The reason why the servers' placement forbids the schedule, with its remedy; "" if it does not."""
    if overlap_of(config.schedule) < Overlap.training or not server_placement(config.rollout).shares_devices:
        return ""
    return (
        "schedule.mode: async generates while the trainer trains, but with rollout.placement=colocated they take turns on "
        "the same devices; set rollout.placement=disaggregated, or schedule.mode=tppo"
    )


def window_jitter_tokens(config: Config) -> int:
    """First windows have from window - this + 1 to window tokens; 0 without windows."""
    window = effective_window_tokens(config)
    if overlap_of(config.schedule) is Overlap.nothing or window >= config.batch.max_response_tokens:
        return 0
    return min(config.batch.window_jitter_tokens, window)


def reuses_first_logprobs(config: Config) -> bool:
    """The log-probs of a step's first policy update are its old log-probs, so that no pass of their own computes them.

    Not so if something before the update reads them: a penalty in the rewards, routes that a pass records, a correction over the
    whole batch, or slots that are kept before the update together with the divergence of their windows.
    """
    correction, kl_place = config.algorithm.correction, config.algorithm.kl.place
    is_per_token = correction.weight in ("none", "token", "sequence", "icepop") and not correction.normalize
    return (
        correction.old_policy is OldPolicy.recomputed
        and is_per_token
        and correction.rejection == "none"
        and not correction.veto_below
        and kl_place is not KlPlace.reward
        and (kl_place is KlPlace.none or overlap_of(config.schedule) < Overlap.publish)
        and config.policy.moe.routing_replay is not RoutingReplay.R2
    )
