"""Combined metrics of a step's updates."""

import numpy as np
import pytest
import torch

from megatron_rl.algorithms import policy_loss
from megatron_rl.config.schema import AlgorithmConfig, Config
from megatron_rl.data.batch import PackedBatch
from megatron_rl.data.rows import Rows
from megatron_rl.step.stages.update_policy import train_policy
from megatron_rl.step.updates import update_metrics
from megatron_rl.training.engine import UpdateResult


def test_metrics_of_a_step_are_divided_once_by_their_own_denominators():
    plans = [{"num_microbatches": 3.0, "rank_imbalance": 0.1}, {"num_microbatches": 2.0, "rank_imbalance": 0.3}]
    results = [
        UpdateResult(1.0, 0.1, {"policy_loss": (2.0, 4.0), "entropy": (3.0, 1.0)}, skipped=False, plan=plans[0]),
        UpdateResult(5.0, 0.2, {"policy_loss": (4.0, 8.0), "entropy": (0.0, 0.0)}, skipped=True, plan=plans[1]),
    ]
    metrics = update_metrics("policy", results)
    assert metrics["policy/loss"] == 0.5 and metrics["policy/entropy"] == 3.0
    assert (metrics["policy/grad_norm"], metrics["policy/lr"]) == (5.0, 0.2)
    assert (metrics["policy/num_updates"], metrics["policy/num_skipped"]) == (1, 1)
    assert (metrics["perf/policy_num_microbatches"], metrics["perf/policy_rank_imbalance"]) == (5.0, pytest.approx(0.2))
    assert update_metrics("critic", []) == {}


@pytest.mark.parametrize(
    ("weights", "expected"), [([1, 1, 1, 9], 0.4285714), ([4, 1, 1], 2 / 3), ([20, 1, 1, 1], 0.3281638), ([2, 2], 1.0)]
)
def test_effective_sample_size_is_over_all_tokens_of_the_steps_updates(weights, expected):
    """(sum w)^2 / (n sum w^2), however the tokens are split over updates; a common factor does not change it."""
    logs = torch.tensor(weights, dtype=torch.float64).log()
    results = []
    for part in (logs[:1], logs[1:]):
        loss = policy_loss(part, torch.zeros_like(part), torch.ones_like(part), torch.ones(len(part)), clip_low=0.2, clip_high=0.2)
        sums = {name: (float(total), float(number)) for name, (total, number) in loss.metrics.items()}
        results.append(UpdateResult(1.0, 0.1, sums, skipped=False))
    metrics = update_metrics("policy", results)
    assert metrics["policy/ess"] == pytest.approx(expected, rel=1e-6) and "policy/ratio_square_mean" not in metrics


@pytest.mark.parametrize("keeps_logprobs", [False, True])
def test_every_update_reads_the_tokens_and_the_routes_that_nobody_has_put_together(keeps_logprobs):
    seen = []

    class Group:
        def update(self, engine, batch, rows, **_):
            seen.append(batch)
            return UpdateResult(1.0, 0.1, {}, skipped=False, plan={}, logprobs=torch.zeros(6))

    mask = torch.tensor([False, True, True, False, True, True])
    parts = {"tokens": Rows.of([[np.arange(3, dtype=np.int32)]] * 2), "routes": Rows.of([[np.ones((3, 2, 2), np.int16)]] * 2)}
    fields = {name: torch.zeros(6) for name in ("advantages", "old_logprobs")} | {"mask": mask}
    batch = PackedBatch(torch.empty(6, device="meta"), torch.tensor([0, 3, 6]), fields, parts=parts)
    config = Config()
    config.batch.policy_minibatch_size = 1
    train_policy(config, Group(), batch, 0, keeps_logprobs=keeps_logprobs)
    assert len(seen) == 2 and all(one.parts == parts for one in seen)
    assert ["old_logprobs" in one.fields for one in seen] == [not keeps_logprobs, True]


def test_m2po_chooses_tokens_over_each_whole_mini_batch_by_the_weights_of_that_update():
    """Alone, the sequence with moves of 0.1 and 0.3 would lose the larger one; with the other sequence it keeps it."""
    moves = torch.tensor([0.0, 0.1, 0.3, 0.0, 0.1, 0.1])
    mask = torch.tensor([False, True, True, False, True, True])
    fields = {"advantages": torch.ones(6), "old_logprobs": torch.full((6,), -2.0), "mask": mask}
    batch = PackedBatch(torch.zeros(6, dtype=torch.int64), torch.tensor([0, 3, 6]), fields)
    seen, passes = [], []

    class Group:
        def logprobs(self, batch, rows, *, temperature):
            passes.append((len(seen), sorted(rows)))
            return torch.where(mask, -2.0 + moves, 0.0)

        def update(self, engine, batch, rows, **_):
            seen.append((sorted(rows), batch.fields["kept"]))
            return UpdateResult(1.0, 0.1, {}, skipped=False, plan={})

    config = Config(algorithm=AlgorithmConfig(policy_loss="m2po", policy_loss_options={"max_second_moment": 0.04}))
    metrics, _ = train_policy(config, Group(), batch, 0)
    assert [(rows, kept.tolist()) for rows, kept in seen] == [([0, 1], mask.tolist())]
    assert passes == [(0, [0, 1])] and metrics["perf/policy_num_selecting_tokens"] == 6

    seen.clear(), passes.clear()
    config.batch.policy_minibatch_size = 1
    train_policy(config, Group(), batch, 0)
    assert {rows[0]: kept.tolist() for rows, kept in seen} == {0: [False, True, *[False] * 4], 1: [*[False] * 4, True, True]}
    assert [number for number, _ in passes] == [0, 1]
