"""Old log-probs from a step's first update equal those of a separate pass, for everything that reads them."""

from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megatron_rl.config.schedule_facts import facts_of, reuses_first_logprobs
from megatron_rl.config.schema import Config, KlPlace, OldPolicy, RoutingReplay
from megatron_rl.data.trajectory import Prompt, Score, Segment, Trajectory
from megatron_rl.step.kl_penalty import KlPenalty
from megatron_rl.step.metrics import passes_metrics
from megatron_rl.step.packing import window_batch
from megatron_rl.step.stages import old_logprobs
from megatron_rl.step.state import StepState
from megatron_rl.step.updates import CriticWarmup
from megatron_rl.step.window_advantages import SINGLE_RESPONSE
from megatron_rl.training.engine import UpdateResult
from tests.token_indices import token_indices
from tests.unit.step.stage_runs import run_stage

STEP = 2


class Ranks:
    """A policy whose log-probs follow from token and number of updates."""

    def __init__(self):
        self.passes, self.updates, self.num_updates = [], [], 0

    def logprobs(self, batch, rows=None, *, temperature, engine="policy"):
        rows = range(batch.num_sequences) if rows is None else rows
        self.passes += [(engine, len(token_indices(batch, rows)))] if len(rows) else []
        moved = self.num_updates if engine == "policy" else 3
        return self.answers(batch, rows, batch.fields["mask"], moved)

    @staticmethod
    def answers(batch, rows, wanted, moved):
        asked = torch.zeros(len(batch.tokens), dtype=torch.bool).index_fill(0, token_indices(batch, rows), True)
        return torch.where(wanted & asked, -1.0 - 0.01 * batch.joined().tokens - 0.1 * moved, 0.0)

    def update(self, engine, batch, rows, *, objective, denominators, temperature=1.0, keeps_logprobs=False):
        self.updates.append(batch.select(rows).joined())
        wanted = batch.fields["mask"] | batch.fields.get("window", batch.fields["mask"])
        logprobs = self.answers(batch, rows, wanted, self.num_updates)
        self.num_updates += 1
        plan = {"num_tokens": float(len(token_indices(batch, rows)))}
        kept = logprobs if keeps_logprobs else None
        return UpdateResult(1.0, 1e-3, {"policy_loss": (1.0, 1.0)}, skipped=False, plan=plan, logprobs=kept)


def responses(num=7, *, all_end=False):
    """Windows of several steps, some (or all) finished in this one; one of them could not be scored."""
    found = []
    for id in range(num):
        lengths = [3 + id % 4, 1 + id % 3]
        segments = [
            Segment(tuple(range(10 * id, 10 * id + n)), (-1.2 - 0.05 * id,) * n, 0, "length", STEP - 1 + k)
            for k, n in enumerate(lengths)
        ]
        if id % 2 or all_end:
            last = segments[-1]
            segments[-1] = Segment(last.token_ids, last.rollout_logprobs, 0, "stop", last.step)
        values = [np.zeros(lengths[0], np.float32)]
        response = Trajectory(id, Prompt(str(id), (1, 2), answer="2"), id, 0, 99, segments, values)
        if response.finished:
            response.score = Score(None if id == 3 else float(id % 3))
        found.append(response)
    return found


def run_a_step(config, *, own=True, convergence=None, group=None, slots=None, dtype=torch.float32):
    """The step's stages that read old log-probs; ``own`` False: as if the first update's were of no use."""
    group, slots = group or Ranks(), slots or responses()
    components = {
        "config": config,
        "facts": facts_of(config),
        "group": group,
        "grader": SimpleNamespace(metrics=lambda finished: {}),
        "rollout": SimpleNamespace(weights_changed=lambda: None, weight_version=0),
        "recorder": SimpleNamespace(elapsed_s=0.0),
        "kl_penalty": KlPenalty(config.algorithm.kl),
        "warmup": CriticWarmup(config, convergence),
        "rules": SINGLE_RESPONSE,
        "stop_after": lambda step: None,
        "store_samples": lambda state, step: None,
        "fleet": None,
        "vision": None,
    }
    batch = window_batch(slots, STEP)
    state = StepState(slots, batch.with_fields(**batch.fields | {"rollout_logprobs": batch.fields["rollout_logprobs"].to(dtype)}))
    state.finished = [t for t in slots if t.finished]
    state.values, state.final_values = torch.zeros(len(state.batch.tokens)), torch.zeros(len(slots))
    if config.algorithm.kl.place is not KlPlace.none:
        run_stage("reference_logprobs", STEP, state, **components)
    with patch.object(old_logprobs, "uses_own_logprobs", old_logprobs.uses_own_logprobs if own else lambda *args: ()):
        run_stage("old_logprobs", STEP, state, **components)
    run_stage("advantages", STEP, state, **components)
    run_stage("update_policy", STEP, state, **components)
    return state, group


def configured(size, kl=KlPlace.none, weight="none"):
    config = Config()
    config.critic.warmup_steps = 0
    config.batch.policy_minibatch_size = size
    config.algorithm.ignore_boundary_tokens = 0
    config.algorithm.correction.weight = weight
    config.algorithm.kl.place, config.algorithm.kl.coef, config.algorithm.kl.target = kl, 0.1, 0.02
    return config


@pytest.mark.parametrize("size", [99, 4, 2])
@pytest.mark.parametrize("kl", [KlPlace.none, KlPlace.loss])
@pytest.mark.parametrize("weight", ["none", "token"])
def test_metrics_and_kl_equal_a_pass_over_all_rows(size, kl, weight):
    (state, group), (whole, with_pass) = (run_a_step(configured(size, kl, weight), own=own) for own in (True, False))
    num_updates = -(-7 // size)
    # What no loss and no metric reads, an update does not tell.
    read = state.batch.fields["mask"] if kl is KlPlace.loss else state.policy_batch.fields["mask"]
    assert torch.equal(state.old_logprobs[read], whole.old_logprobs[read])
    names = {name for name in whole.metrics if name.startswith(("mismatch/", "kl/"))}
    assert len(names) > 5 and {name: state.metrics[name] for name in names} == {n: whole.metrics[n] for n in names}
    assert [t.reference_kl for t in state.trajectories] == [t.reference_kl for t in whole.trajectories]
    first, others = group.updates[0], group.updates[1:]
    assert len(group.updates) == len(with_pass.updates) and "old_logprobs" not in first.fields
    assert all("old_logprobs" in batch.fields and "window" not in batch.fields for batch in others)
    passed = sum(number for engine, number in group.passes if engine == "policy")
    own = int(state.batch.lengths[list(state.first_update)].sum())
    assert passed == len(state.batch.tokens) - own and len(state.first_update) == 7 // num_updates


def test_one_update_needs_no_pass_at_all():
    state, group = run_a_step(configured(7))
    assert group.passes == [] and len(group.updates) == 1
    assert state.old_logprobs[state.policy_batch.fields["mask"]].max() == -1.0


def test_sequences_that_train_nothing_are_left_out_of_updates_but_for_the_first():
    """Response 3 has no score."""
    config = configured(2)
    state, group = run_a_step(config)
    counted = state.policy_batch.fields["mask"].split(state.batch.lengths.tolist())
    useful = [row for row, mask in enumerate(counted) if mask.any()]
    assert useful == [0, 1, 2, 4, 5, 6]
    rows = [tuple(part.tolist()) for batch in group.updates[1:] for part in batch.tokens.split(batch.lengths.tolist())]
    first = [tuple(part.tolist()) for part in group.updates[0].tokens.split(group.updates[0].lengths.tolist())]
    assert {row[2] // 10 for row in (*rows, *first)} >= set(useful) and 3 not in {row[2] // 10 for row in rows}


def test_a_first_minibatch_that_takes_no_step_is_passed_where_its_divergence_is_measured(monkeypatch):
    config = configured(1, KlPlace.loss)
    monkeypatch.setattr("megatron_rl.step.updates.split_minibatches", lambda *args: [[3], [0, 1, 2], [4, 5, 6]])
    (state, group), (whole, _) = (run_a_step(config, own=own) for own in (True, False))
    assert torch.equal(state.old_logprobs, whole.old_logprobs)
    assert state.metrics["kl/reference_per_response"] == whole.metrics["kl/reference_per_response"]
    assert len(group.updates) == 2


def test_a_policy_that_never_trains_is_not_passed_and_one_that_rests_is():
    config = configured(2)
    state, group = run_a_step(config, convergence=SimpleNamespace())
    assert group.passes == group.updates == [] and not any(name.startswith("mismatch/") for name in state.metrics)
    config.critic.warmup_steps = STEP + 1
    state, group = run_a_step(config)
    assert len(group.passes) == 1 and group.updates == [] and "mismatch/k3" in state.metrics


@pytest.mark.parametrize(
    "change",
    [
        lambda c: setattr(c.algorithm.correction, "old_policy", OldPolicy.rollout),
        lambda c: setattr(c.algorithm.correction, "rejection", "token"),
        lambda c: setattr(c.algorithm.correction, "veto_below", 1e-4),
        lambda c: setattr(c.algorithm.correction, "normalize", True),
        lambda c: setattr(c.algorithm.correction, "weight", "package.module:function"),
        lambda c: setattr(c.algorithm.kl, "place", KlPlace.reward),
        lambda c: setattr(c.policy.moe, "routing_replay", RoutingReplay.R2),
    ],
)
def test_readers_before_the_update_require_the_old_logprobs_pass(change):
    config = configured(99)
    assert reuses_first_logprobs(config)
    change(config)
    assert not reuses_first_logprobs(config)


def test_passes_are_counted_by_stage_for_each_generated_token():
    state, _ = run_a_step(configured(4, KlPlace.loss))
    total, new = len(state.batch.tokens), sum(t.window_tokens(STEP) for t in state.trajectories)
    state.metrics |= {"perf/critic_num_tokens": 30.0}
    found = passes_metrics(state)
    assert found["passes/values"] == found["passes/reference_logprobs"] == total / new
    assert found["passes/old_logprobs"] == pytest.approx(found["passes/values"] - sum(state.batch.lengths[list(state.first_update)]) / new)
    assert found["passes/update_critic"] == 30.0 / new and "passes/process_rewards" not in found
    assert found["passes/all"] == pytest.approx(sum(v for name, v in found.items() if name != "passes/all"))
