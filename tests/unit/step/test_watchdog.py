"""Signs of collapsed training: found when they persist, silent about noise, restored after a resume."""

import json
import random

import pytest

from megatron_rl.config.schema import HealthAction, HealthConfig
from megatron_rl.step.watchdog import Watchdog

ALIVE = {
    "policy/entropy": 1.2,
    "policy/grad_norm": 0.3,
    "policy/num_updates": 4.0,
    "policy/num_skipped": 0.0,
    "critic/grad_norm": 0.8,
    "critic/num_updates": 4.0,
    "critic/num_skipped": 0.0,
    "reward/mean": 0.5,
    "mismatch/k3": 1e-5,
}


def watchdog(**settings):
    return Watchdog(HealthConfig(**{"patience_steps": 3, **settings}), max_error_rate=0.2)


def signs(dog, rows, **more):
    """(step, sign) of everything found."""
    return [(step, f.sign) for step, row in enumerate(rows) for f in dog.observe(step, {**ALIVE, **row}, **more)]


@pytest.mark.parametrize(
    ("sign", "row"),
    [
        ("entropy", {"policy/entropy": 1e-7}),
        ("gradient", {"policy/grad_norm": 0.0}),
        ("gradient", {"critic/grad_norm": 0.0}),
        ("gradient", {"policy/num_skipped": 4.0, "policy/num_updates": 0.0}),
        ("gradient", {"critic/num_skipped": 1.0}),
        ("gradient", {"policy/num_updates": 0.0}),
        ("mismatch", {"mismatch/k3": 0.5}),
        ("mismatch", {"mismatch/k3": float("nan")}),
        ("ess", {"policy/ess": 0.09, "mismatch/ess": 0.9}),
        ("ess", {"policy/ess": 0.9, "mismatch/ess": 0.09}),
        ("ess", {"policy/ess": float("nan")}),
    ],
)
def test_a_sign_acts_when_it_has_held_for_the_patience_and_again_after_as_many_steps(sign, row):
    assert signs(watchdog(), [row] * 7) == [(2, sign), (5, sign)]
    # One good step in between begins the count anew.
    assert signs(watchdog(), [row, row, {}, row, row]) == []


def test_the_least_healthy_effective_sample_size_and_its_action_are_settings():
    row = {"policy/ess": 0.3}
    assert signs(watchdog(), [row] * 6) == []
    assert signs(watchdog(min_ess=0.5), [row] * 3) == [(2, "ess")]
    assert signs(watchdog(min_ess=0.5, ess=HealthAction.ignore), [row] * 3) == []
    (found,) = watchdog(min_ess=0.5, ess=HealthAction.stop, patience_steps=1).observe(0, {**ALIVE, **row})
    assert found.action is HealthAction.stop and "0.3 of the tokens, below health.min_ess=0.5" in found.message


def test_too_many_reward_errors_act_immediately():
    assert signs(watchdog(), [{}, {"reward/error_rate": 0.3}, {"reward/error_rate": 0.2}]) == [(1, "reward_errors")]


def test_collapsed_reward_remains_a_finding():
    rows = [{"reward/mean": 0.4}] * 6 + [{"reward/mean": 0.0}] * 9
    found = signs(watchdog(), rows)
    assert found and all(sign == "reward_drop" for _, sign in found) and len(found) >= 2


def test_the_accuracy_counts_before_a_shaped_reward():
    rows = [{"reward/accuracy": 0.6, "reward/mean": -0.1 * step} for step in range(20)]
    assert signs(watchdog(), rows) == []


def test_noise_around_a_steady_or_rising_reward_is_no_collapse():
    false_alarms = 0
    for seed in range(200):
        draw = random.Random(seed)
        slope = draw.choice([0.0, 0.002])
        rows = [{"reward/mean": sum(draw.random() < 0.15 + slope * t for _ in range(32)) / 32} for t in range(150)]
        false_alarms += bool(signs(watchdog(patience_steps=5), rows))
    assert false_alarms <= 2


def test_a_resting_policy_and_a_step_without_finished_responses_are_no_signs():
    resting = {name: value for name, value in ALIVE.items() if not name.startswith("policy/")}
    dog = watchdog()
    assert [dog.observe(step, resting, policy_trains=False) for step in range(6)] == [[]] * 6
    no_critic = {name: value for name, value in ALIVE.items() if not name.startswith(("critic/", "reward/"))}
    assert [dog.observe(step, no_critic) for step in range(6)] == [[]] * 6 and dog.healthy


def test_a_policy_that_trains_on_nothing_is_a_sign():
    nothing = {"reward/mean": 0.5}
    dog = watchdog()
    found = [f for step in range(3) for f in dog.observe(step, nothing)]
    assert [f.sign for f in found] == ["gradient"] and "no token to train on" in found[0].message


def test_the_configuration_chooses_the_action_and_ignored_signs_are_still_counted():
    dog = watchdog(gradient=HealthAction.roll_back, entropy=HealthAction.ignore)
    rows = {**ALIVE, "policy/grad_norm": 0.0, "policy/entropy": 0.0}
    found = [f for step in range(3) for f in dog.observe(step, rows)]
    assert [(f.sign, f.action) for f in found] == [("gradient", HealthAction.roll_back)]
    assert "steps 1 to 3" in found[0].message and not dog.healthy
    assert dog.metrics() == {"health/num_signs": 2.0, "health/num_findings": 2.0, "health/num_rollbacks": 0.0}


def test_a_resumed_watchdog_finds_what_an_uninterrupted_one_finds():
    draw = random.Random(5)
    rows = [
        {"reward/mean": max(0.0, 0.8 - 0.02 * t + 0.01 * draw.random()), "policy/grad_norm": draw.choice([0.0, 0.0, 1.0])}
        for t in range(60)
    ]
    whole = watchdog()
    expected = signs(whole, rows)
    for cut in (1, 17, 40):
        first, second = watchdog(), watchdog()
        before = signs(first, rows[:cut])
        second.load_state(json.loads(json.dumps(first.state())))
        after = [
            (cut + i, f.sign) for i, row in enumerate(rows[cut:]) for f in second.observe(cut + i, {**ALIVE, **row})
        ]
        assert before + after == expected and second.metrics() == whole.metrics()
