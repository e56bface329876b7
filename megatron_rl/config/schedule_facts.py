"""The facts of a configuration's schedule, derived once: all code outside this file reads facts instead of the mode."""

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import assert_never

from megatron_rl.config.derived import (
    effective_window_tokens,
    max_remainder_tokens,
    needs_critic,
    needs_reference,
    relates_tokens,
    shares_devices,
)
from megatron_rl.config.schema import Config, KlPlace, Mode, OldPolicy, RoutingReplay, ScheduleConfig, WeightUpdate


class Overlap(IntEnum):
    """The work that runs while the servers generate the next window; each member includes all smaller members."""

    nothing = 0
    critic = 1
    """The critic's update."""
    training = 2
    """All of training."""
    publish = 3
    """Training, and the publish of its weights."""


@dataclass(frozen=True)
class Facts:
    """The schedule of a run, and the models that it has in addition to the policy."""

    overlap: Overlap = Overlap.critic
    colocated: bool = False
    """True if servers and trainer time-share the same devices."""
    critic: bool = True
    reference: bool = False
    process_rewards: bool = False
    critic_first: bool = False
    """True if the critic's updates precede the policy's, whose advantages then come from its new values."""
    training_window_tokens: float = 1
    """Untrained tokens with which an unfinished response trains; 1: all that it has, inf: only finished responses train."""
    whole_groups: bool = False
    """True if the responses to a prompt train together, in the step in which the last one ends."""
    max_staleness: int = 1
    """Number of windows that are generated ahead, if training overlaps with generation."""

    @property
    def windows(self) -> bool:
        """True if a response may continue in the next step; without windows each step generates full responses."""
        return self.overlap > Overlap.nothing

    @property
    def ahead(self) -> int:
        """Number of steps between generation and training, which is also the staleness of a window's weights."""
        return self.max_staleness if self.overlap >= Overlap.training else 0

    @property
    def in_flight(self) -> bool:
        """True if the servers receive new weights while they generate a window."""
        return self.overlap >= Overlap.publish

    @property
    def alternates(self) -> bool:
        """True if servers and trainer never work at the same time."""
        return self.colocated or self.overlap is Overlap.nothing

    @property
    def whole_responses(self) -> bool:
        """True if the policy trains on finished responses, over all their windows."""
        return math.isinf(self.training_window_tokens)


def overlap_of(schedule: ScheduleConfig) -> Overlap:
    """Return the overlap of a mode. Only this function matches on modes, so that the type checker reports an unhandled new mode."""
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
    """Return the key=value because of which no window is generated while the trainer trains."""
    return f"max_staleness={schedule.max_staleness}" if schedule.mode is Mode.async_ else f"mode={schedule.mode.value}"


def facts_of(config: Config) -> Facts:
    overlap, critic = overlap_of(config.schedule), needs_critic(config)
    whole_groups = overlap > Overlap.nothing and not critic and relates_tokens(config)
    training_window: float | None = config.schedule.training_window_tokens
    if whole_groups or training_window == 0 or (training_window or 0) >= config.batch.max_response_tokens:
        training_window = math.inf
    return Facts(
        overlap=overlap,
        colocated=shares_devices(config.rollout),
        critic=critic,
        reference=needs_reference(config),
        process_rewards=bool(config.reward.process.path),
        critic_first=critic and config.schedule.critic_first,
        training_window_tokens=training_window or 1,
        whole_groups=whole_groups,
        max_staleness=max(config.schedule.max_staleness, 1),
    )


def max_windows(config: Config) -> int:
    """Return the number of windows of a response of the whole budget whose first window is the shortest."""
    window, jitter = effective_window_tokens(config), window_jitter_tokens(config)
    return max(1, math.ceil((config.batch.max_response_tokens + max(jitter - 1, 0) - max_remainder_tokens(window)) / window))


def max_trained_windows(config: Config) -> int:
    """Return the largest number of windows that train a response at once; all but the last are sampled by older policies.

    The bound does not hold for windows that over-sampling aborts, nor for groups whose responses start in different steps.
    """
    training_window = facts_of(config).training_window_tokens
    if math.isinf(training_window):
        return max_windows(config)
    return math.ceil(training_window / effective_window_tokens(config))


def placement_problem(config: Config) -> str:
    """Return the reason why the servers' placement forbids the schedule, with its remedy, or an empty string."""
    if overlap_of(config.schedule) < Overlap.training or not shares_devices(config.rollout):
        return ""
    return (
        "schedule.mode: async generates while the trainer trains, but with rollout.placement=colocated they take turns on "
        "the same devices; set rollout.placement=disaggregated, or schedule.mode=tppo"
    )


def window_jitter_tokens(config: Config) -> int:
    """Return the jitter of first windows, which have from window - jitter + 1 to window tokens; 0 without windows."""
    window = effective_window_tokens(config)
    if overlap_of(config.schedule) is Overlap.nothing or window >= config.batch.max_response_tokens:
        return 0
    return min(config.batch.window_jitter_tokens, window)


def reuses_first_logprobs(config: Config) -> bool:
    """Return whether the log-probs of a step's first policy update serve as its old log-probs, without a separate pass.

    False if a reader before the update needs them: a penalty in the rewards, routes recorded by a pass, a
    correction over the whole batch, or slots that are stored before the update together with the divergence of
    their windows.
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
