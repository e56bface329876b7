"""What a step's optimizer steps say together."""

import pytest

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
