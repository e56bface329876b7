"""The choice of stored responses; stored columns equal the trained batch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.config.schema import Config, KlPlace
from megatron_rl.data.trajectory import Prompt, Segment, Trajectory
from megatron_rl.step.stored_responses import chosen_responses, sample_columns, store_samples
from tests.unit.step.test_first_updates import STEP, configured, run_a_step


def groups(numbers, size):
    return [Trajectory(100 * g + i, Prompt(str(g), (1,)), g, i, 9) for g in numbers for i in range(size)]


def test_whole_groups_are_chosen_and_stay_chosen_while_others_come_and_go():
    population = set(range(40))
    rng = np.random.default_rng(0)
    before, kept = None, 0
    for step in range(30):
        chosen = chosen_responses(groups(sorted(population), 4), 18, seed=3)
        by_group = [t.group_id for t in chosen]
        assert len(chosen) == 16 and all(by_group.count(group) == 4 for group in by_group)
        assert chosen == sorted(chosen, key=lambda t: (t.group_id, t.sample_index))
        now = set(by_group)
        if before is not None:
            # Chosen ones leave only with the population, or for a new group.
            lost, new = (before & population) - now, now - before
            assert len(lost) <= len(new) and all(group >= 40 + 5 * (step - 1) for group in new - before) | (len(now) == 4)
            kept += len(now & before)
        before = now
        gone = rng.choice(sorted(population), 5, replace=False)
        population = (population - set(gone.tolist())) | set(range(40 + 5 * step, 45 + 5 * step))
    assert kept > 60  # of 29 x 4


def test_every_group_has_the_same_chance_and_the_seed_decides():
    counts = np.zeros(20)
    for seed in range(2000):
        for group in {t.group_id for t in chosen_responses(groups(range(20), 2), 10, seed=seed)}:
            counts[group] += 1
    assert abs(counts / 2000 - 0.25).max() < 0.05
    one, two = (chosen_responses(groups(range(20), 2), 10, seed=seed) for seed in (1, 2))
    assert [t.id for t in one] != [t.id for t in two]


def test_too_large_group_stores_its_first_samples():
    chosen = chosen_responses(groups(range(3), 16), 5, seed=0)
    assert [t.sample_index for t in chosen] == [0, 1, 2, 3, 4] and len({t.group_id for t in chosen}) == 1


def stored(state, step=STEP):
    """Rows by id, from everything."""
    rows = [(t, row) for row, t in enumerate(state.trajectories)]
    columns = sample_columns(state, rows, step)
    return {id: {name: values[i] for name, values in columns.items()} for i, id in enumerate(columns["id"])}


@pytest.mark.parametrize("size", [99, 2])
@pytest.mark.parametrize("kl", [KlPlace.none, KlPlace.loss])
def test_stored_columns_equal_the_trained_batch(size, kl):
    state, _ = run_a_step(configured(size, kl))
    found = stored(state)
    batch, policy = state.batch, state.policy_batch
    for row, trajectory in enumerate(state.trajectories):
        one = found[trajectory.id]
        start = int(batch.cu_seqlens[row]) + len(trajectory.prompt.token_ids)
        assert one["token_ids"].tolist() == trajectory.response_ids.tolist()
        for t in range(trajectory.num_response_tokens):
            in_window = bool(batch.fields["mask"][start + t])
            assert one["mask"][t] == bool(policy.fields["mask"][start + t])
            assert one["rollout_logprobs"][t] == np.float32(trajectory.rollout_logprobs()[t])
            if in_window:
                assert one["advantages"][t] == float(policy.fields["advantages"][start + t])
                assert one["values"][t] == float(state.values[start + t])
            else:
                assert np.isnan(one["advantages"][t]) and np.isnan(one["trainer_logprobs"][t]) and np.isnan(one["values"][t])
            if one["mask"][t]:
                assert one["trainer_logprobs"][t] == float(state.old_logprobs[start + t]) != 0
        assert one["trained_tokens"] == one["mask"].sum() and one["new_tokens"] == trajectory.window_tokens(STEP)
        assert one["reward"] == trajectory.reward and one["finished"] == trajectory.finished
        assert one["length"] == sum(segment[0] for segment in one["segments"])
    # Means over samples are those of the step: the divergence of server and trainer, over the trained tokens.
    apart = [one["rollout_logprobs"][one["mask"]] - one["trainer_logprobs"][one["mask"]] for one in found.values()]
    assert np.concatenate(apart).mean() == pytest.approx(state.metrics["mismatch/kl"], rel=1e-4)


def test_log_probs_that_were_not_computed_are_nan():
    state, _ = run_a_step(configured(99))
    state.old_logprobs = state.batch.fields["rollout_logprobs"]
    assert all(np.isnan(one["trainer_logprobs"]).all() and one["mismatch"] is None for one in stored(state).values())
    state.old_logprobs = torch.zeros(len(state.batch.tokens))  # of a first update that there was none
    assert state.first_update
    assert all(np.isnan(one["trainer_logprobs"]).all() for one in stored(state).values())


def test_responses_that_train_nothing_are_stored_too():
    state, _ = run_a_step(configured(99))
    greedy = Trajectory(50, Prompt("g", (1, 2)), 50, 0, 99, [Segment((5, 6), (-1.0, -2.0), 3, "stop", STEP)], greedy=True)
    untouched = Trajectory(51, Prompt("g", (1, 2)), 50, 1, 99)
    state.slots = [*state.trajectories, greedy, untouched]
    kept = []
    recorder = SimpleNamespace(samples=SimpleNamespace(add=lambda step, columns: kept.append((step, columns))))
    config = Config()
    store_samples(config, recorder, state, STEP)
    ((step, columns),) = kept
    assert step == STEP + 1 and sorted(columns["id"]) == [*range(7), 50]
    place = columns["id"].index(50)
    assert columns["greedy"][place] and not columns["mask"][place].any() and columns["advantage"][place] is None
    assert columns["segments"][place] == [(2, STEP + 1, 3, 0, "policy", "stop", None)]
    config.tracking.samples_per_step = 0
    store_samples(config, recorder, state, STEP)
    assert len(kept) == 1
