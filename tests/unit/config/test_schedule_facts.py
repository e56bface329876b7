"""The facts that a schedule comes to: one meaning per mode, and what follows from it for responses, groups and devices."""

import pytest

from megatron_rl.config.schedule_facts import (
    Facts,
    Overlap,
    facts_of,
    overlap_of,
    placement_problem,
    why_not_ahead,
    window_jitter_tokens,
)
from megatron_rl.config.schema import Config, KlPlace, Mode, Placement, ScheduleConfig, TrainsOn, WeightUpdate


@pytest.mark.parametrize(
    ("mode", "staleness", "weight_update", "overlap"),
    [
        (Mode.sync, 1, WeightUpdate.between, Overlap.nothing),
        (Mode.tppo, 1, WeightUpdate.between, Overlap.critic),
        (Mode.async_, 0, WeightUpdate.in_flight, Overlap.critic),
        (Mode.async_, 1, WeightUpdate.between, Overlap.training),
        (Mode.async_, 1, WeightUpdate.in_flight, Overlap.publish),
    ],
)
def test_a_schedule_has_one_overlap(mode, staleness, weight_update, overlap):
    assert overlap_of(ScheduleConfig(mode=mode, max_staleness=staleness, weight_update=weight_update)) is overlap


def test_every_mode_has_a_meaning():
    assert all(overlap_of(ScheduleConfig(mode=mode)) in Overlap for mode in Mode)


def test_each_overlap_includes_the_ones_before():
    found = [(facts.windows, facts.ahead, facts.in_flight) for facts in map(Facts, Overlap)]
    assert found == [(False, 0, False), (True, 0, False), (True, 1, False), (True, 1, True)]


def test_servers_and_trainer_alternate_in_sync_and_on_shared_devices():
    assert Facts(Overlap.nothing).alternates and Facts(colocated=True).alternates
    assert not Facts().alternates and not Facts(Overlap.training).alternates


@pytest.mark.parametrize(("mode", "advantage", "whole"), [("sync", "group", False), ("tppo", "group", True), ("tppo", "egae", False)])
def test_whole_groups_train_in_windows_without_a_critic(mode, advantage, whole):
    config = Config()
    config.schedule.mode, config.algorithm.advantage = Mode(mode), advantage
    facts = facts_of(config)
    assert facts.critic is (advantage == "egae") and facts.whole_groups is facts.whole_responses is whole
    assert facts.trained_window(3) == (None if whole else 3)


def test_whole_responses_train_where_the_policy_trains_on_them():
    config = Config()
    config.schedule.policy_trains_on = TrainsOn.responses
    assert facts_of(config) == Facts(whole_responses=True)
    config.algorithm.kl.place, config.reward.process.path = KlPlace.loss, "model"
    assert facts_of(config) == Facts(reference=True, process_rewards=True, whole_responses=True)


def test_windows_ahead_need_devices_of_their_own():
    config = Config()
    config.rollout.placement = Placement.colocated
    assert placement_problem(config) == "" and facts_of(config).colocated
    config.schedule.mode = Mode.async_
    assert "rollout.placement=colocated" in placement_problem(config)


def test_the_key_that_keeps_generation_from_running_ahead_is_named():
    assert why_not_ahead(ScheduleConfig(mode=Mode.async_, max_staleness=0)) == "max_staleness=0"
    assert why_not_ahead(ScheduleConfig(mode=Mode.tppo)) == "mode=tppo"


def test_the_jitter_is_at_most_a_window_and_only_with_windows():
    config = Config()
    config.batch.max_response_tokens, config.batch.window_tokens, config.batch.window_jitter_tokens = 1000, 100, 128
    assert window_jitter_tokens(config) == 100
    config.schedule.mode = Mode.sync
    assert window_jitter_tokens(config) == 0
