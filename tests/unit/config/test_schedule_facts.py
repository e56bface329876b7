"""The schedule that a configuration describes: overlap, responses, groups and devices."""

import math

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
from megatron_rl.config.schema import Config, KlPlace, Mode, Placement, ScheduleConfig, WeightUpdate
from megatron_rl.desk.plan.dry_run import batch_arithmetic


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
def test_every_schedule_has_one_overlap(mode, staleness, weight_update, overlap):
    assert overlap_of(ScheduleConfig(mode=mode, max_staleness=staleness, weight_update=weight_update)) is overlap


@pytest.mark.parametrize("staleness", range(9))
def test_as_many_windows_are_ahead_as_the_staleness_says(staleness):
    config = Config()
    config.schedule.max_staleness = staleness
    assert facts_of(config).ahead == 0  # mode tppo
    config.schedule.mode = Mode.async_
    assert facts_of(config).ahead == staleness
    assert facts_of(config).overlap is (Overlap.training if staleness else Overlap.critic)


def test_every_mode_has_a_meaning():
    assert all(overlap_of(ScheduleConfig(mode=mode)) in Overlap for mode in Mode)


def test_each_overlap_includes_all_smaller_overlaps():
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


@pytest.mark.parametrize(("tokens", "expected"), [(None, 1), (16384, 16384), (0, math.inf), (24576, math.inf), (99999, math.inf)])
def test_window_of_training_has_a_number_of_untrained_tokens_up_to_whole_responses(tokens, expected):
    config = Config()
    config.batch.max_response_tokens, config.batch.window_tokens = 24576, 8192
    config.schedule.training_window_tokens = tokens
    assert facts_of(config).training_window_tokens == expected


@pytest.mark.parametrize(("mode", "tokens", "updates"), [
    (Mode.tppo, None, "0"), (Mode.tppo, 8192, "0"), (Mode.tppo, 8193, "1"), (Mode.tppo, 12288, "1"), (Mode.tppo, 0, "2"),
    (Mode.async_, None, "1"), (Mode.async_, 12288, "2"), (Mode.async_, 0, "3"), (Mode.sync, 0, "0"), (Mode.sync, None, "0"),
])  # fmt: skip
def test_oldest_token_is_as_many_updates_old_as_later_windows_train_with_it(mode, tokens, updates):
    config = Config()
    config.batch.max_response_tokens, config.batch.window_tokens = 24576, 8192 if mode is not Mode.sync else 0
    config.schedule.mode, config.schedule.training_window_tokens = mode, tokens
    assert batch_arithmetic(config, 1)["oldest trained token (weight versions)"][0] == updates


def test_aborted_windows_and_waiting_groups_may_train_older_tokens():
    config = Config()
    config.batch.max_response_tokens, config.batch.window_tokens = 24576, 8192
    config.rollout.over_sampling = 1.5
    assert batch_arithmetic(config, 1)["oldest trained token (weight versions)"][0] == "0"
    config.schedule.training_window_tokens = 0
    assert batch_arithmetic(config, 1)["oldest trained token (weight versions)"][0] == "2 or more"
    config.rollout.over_sampling, config.algorithm.advantage = 1.0, "group"
    assert batch_arithmetic(config, 1)["oldest trained token (weight versions)"][0] == "2 or more"


def test_whole_responses_are_a_window_of_training_without_end():
    config = Config()
    config.schedule.training_window_tokens = 0
    assert facts_of(config) == Facts(training_window_tokens=math.inf)
    config.algorithm.kl.place, config.reward.process.path = KlPlace.loss, "model"
    assert facts_of(config) == Facts(reference=True, process_rewards=True, training_window_tokens=math.inf)


def test_windows_ahead_need_separate_devices():
    config = Config()
    config.rollout.placement = Placement.colocated
    assert placement_problem(config) == "" and facts_of(config).colocated
    config.schedule.mode = Mode.async_
    assert "rollout.placement=colocated" in placement_problem(config)


def test_key_that_prevents_windows_ahead_is_reported():
    assert why_not_ahead(ScheduleConfig(mode=Mode.async_, max_staleness=0)) == "max_staleness=0"
    assert why_not_ahead(ScheduleConfig(mode=Mode.tppo)) == "mode=tppo"


def test_jitter_is_at_most_a_window_and_needs_windows():
    config = Config()
    config.batch.max_response_tokens, config.batch.window_tokens, config.batch.window_jitter_tokens = 1000, 100, 128
    assert window_jitter_tokens(config) == 100
    config.schedule.mode = Mode.sync
    assert window_jitter_tokens(config) == 0
