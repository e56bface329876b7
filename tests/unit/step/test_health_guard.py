"""Actions on warning signs: warning, stop, rollback, and the parity check with the servers."""

from types import SimpleNamespace

import pytest

from megatron_rl.algorithms.mismatch import MismatchStats
from megatron_rl.config.schedule_facts import Facts
from megatron_rl.config.schema import Config, HealthAction, HealthConfig
from megatron_rl.errors import UserError
from megatron_rl.step.health_guard import HealthGuard
from megatron_rl.step.kl_penalty import KlPenalty
from megatron_rl.step.parity import EngineMismatch, Parity
from megatron_rl.step.step_saver import StepSaver
from megatron_rl.step.updates import CriticWarmup
from megatron_rl.step.watchdog import Rollback, Watchdog
from tests.unit.step.stage_runs import run_stage
from tests.unit.step.test_stages import batch_of, state_of


class WatchedRun:
    """A run whose policy's gradient is zero in every step; the guard's and the saver's own code on stand-ins."""

    def __init__(self, action, *, compare=None, healthy_checkpoint="step-1", num_rollbacks=0):
        config, self.warnings, self.saved = Config(), [], []
        health = HealthConfig(patience_steps=2, gradient=action, parity=action)
        checkpointer = SimpleNamespace(
            due=lambda step: True,
            save=lambda step, driver, **rest: self.saved.append(driver) or "",
            newest_healthy=healthy_checkpoint,
            newest_step=-1,
            num_failed=0,
        )
        recorder = SimpleNamespace(flush_records=lambda: None, console=SimpleNamespace(warning=self.warnings.append))
        pool = SimpleNamespace(
            position=lambda: {"next_id": 7}, release_finished=lambda step: [], snapshot=lambda: lambda: {"next_id": 5}
        )
        published = SimpleNamespace(seconds=0.1, num_bytes=8, buffer_bytes=0)
        rollout = SimpleNamespace(restart_counts=list, trainer_version=1, weight_version=1, publish=lambda: published)
        parity = SimpleNamespace(due=lambda step: compare is not None, compare=compare)
        warmup, watchdog, kl_penalty = CriticWarmup(config), Watchdog(health), KlPenalty(config.algorithm.kl)
        watchdog.num_rollbacks = num_rollbacks
        self.components = {
            "health": HealthGuard(watchdog, parity, checkpointer, recorder, pool, warmup),
            "saver": StepSaver(checkpointer, recorder, rollout, pool, kl_penalty, warmup, watchdog),
            "policy_exporter": SimpleNamespace(keep_if_due=lambda step, trained_s: None),
            "facts": Facts(),
            "rollout": rollout,
            "pool": pool,
            "kl_penalty": kl_penalty,
            "evaluator": None,
            "fleet": None,
        }
        self.states = [state_of(policy_batch=batch_of([[1]])) for _ in range(4)]
        for state in self.states:
            state.metrics |= {"policy/num_updates": 1.0, "policy/grad_norm": 0.0}

    def checkpoint(self, step):
        run_stage("checkpoint", step, self.states[step], **self.components)

    def publish(self, step):
        run_stage("publish", step, self.states[step], **self.components)


def test_a_dead_policy_is_warned_of_and_its_watchdog_is_in_the_checkpoint():
    run = WatchedRun(HealthAction.warn)
    for step in range(4):
        run.checkpoint(step)
    assert len(run.warnings) == 2 and "the gradient of the policy is zero" in run.warnings[0]
    assert run.states[3].metrics["health/num_signs"] == 1
    assert [driver["watchdog"]["num_steps"]["gradient"] for driver in run.saved] == [1, 2, 3, 4]
    assert run.saved[0]["pool"] == {"next_id": 5}


@pytest.mark.parametrize(("action", "raised"), [(HealthAction.stop, UserError), (HealthAction.roll_back, Rollback)])
def test_a_dead_policy_that_ends_the_run_is_not_saved(action, raised):
    run = WatchedRun(action)
    run.checkpoint(0)
    with pytest.raises(raised, match="the gradient of the policy is zero") as caught:
        run.checkpoint(1)
    assert len(run.saved) == 1 and not run.warnings
    if raised is Rollback:
        assert (caught.value.position, caught.value.number) == ({"next_id": 7}, 1)
    else:
        assert "last healthy checkpoint is step-1" in str(caught.value)


@pytest.mark.parametrize(
    ("state", "words"),
    [({"healthy_checkpoint": None}, "No healthy checkpoint"), ({"num_rollbacks": 2}, "Already rolled back 2 times")],
)
def test_a_run_that_cannot_go_back_any_more_stops(state, words):
    run = WatchedRun(HealthAction.roll_back, **state)
    run.checkpoint(0)
    with pytest.raises(UserError, match=words):
        run.checkpoint(1)


@pytest.mark.parametrize("action", [HealthAction.ignore, HealthAction.warn, HealthAction.stop])
def test_a_comparison_that_fails_during_the_run_does_what_the_configuration_says(action):
    def differ():
        raise EngineMismatch("they differ")

    run = WatchedRun(action, compare=differ)
    if action is HealthAction.stop:
        with pytest.raises(UserError, match="they differ"):
            run.publish(0)
    else:
        run.publish(0)
        assert run.warnings == (["they differ"] if action is HealthAction.warn else [])


def test_engines_that_agree_during_the_run_leave_their_difference_in_the_metrics():
    parity = Parity(MismatchStats(mean=1e-7, k3=1e-13, outliers=0.0, max=1e-6), MismatchStats(1.0, 1.0, 1.0, 1.0), 40)
    run = WatchedRun(HealthAction.stop, compare=lambda: parity)
    run.publish(0)
    found = run.states[0].metrics
    assert {name: found[f"mismatch/parity_{name}"] for name in vars(parity.figures)} == vars(parity.figures)


def test_engines_that_differ_leave_their_figures_in_the_metrics_too():
    parity = Parity(MismatchStats(mean=0.4, k3=0.3, outliers=0.2, max=3.0), MismatchStats(0.1, 0.1, 0.1, 1.0), 40)

    def differ():
        raise EngineMismatch("they differ", parity)

    run = WatchedRun(HealthAction.warn, compare=differ)
    run.publish(0)
    assert run.warnings and run.states[0].metrics["mismatch/parity_outliers"] == 0.2
