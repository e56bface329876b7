"""Laws of the metrics that compare the servers' policy with the trainer's."""

import math

import pytest
import torch

from megatron_rl.algorithms import mismatch_metrics

BOUNDS = torch.tensor([0, 2, 2, 5])


def test_equal_policies_have_no_mismatch():
    logprobs = -torch.rand(5)
    expected = {"kl": 0, "k3": 0, "max_abs_log_ratio": 0, "ppl_ratio": 1, "ess": 1, "chi2_token": 0, "chi2_sequence": 0}
    assert mismatch_metrics(logprobs, logprobs, torch.ones(5), BOUNDS) == pytest.approx(expected)


@pytest.mark.parametrize("mask", [torch.zeros(5), torch.zeros(5, dtype=torch.bool)])
def test_mismatch_of_an_empty_mask_is_of_equal_policies(mask: torch.Tensor):
    metrics = mismatch_metrics(torch.rand(5), -torch.rand(5), mask, BOUNDS)
    assert metrics == mismatch_metrics(torch.zeros(5), torch.zeros(5), torch.ones(5), BOUNDS)


def test_mismatch_metrics_equal_their_definitions():
    old = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5], dtype=torch.float64)
    rollout = torch.tensor([-1.2, -1.7, -0.5, -2.0, 9.0], dtype=torch.float64)
    metrics = mismatch_metrics(old, rollout, torch.tensor([1, 1, 1, 1, 0]), BOUNDS)
    log_rho = [0.2, -0.3, 0.0, -1.0]
    rho = [math.exp(x) for x in log_rho]
    mean_square = sum(x * x for x in rho) / 4
    assert metrics == pytest.approx(
        {
            "kl": -sum(log_rho) / 4,
            "k3": sum(r - 1 - x for r, x in zip(rho, log_rho)) / 4,
            "max_abs_log_ratio": 1.0,
            "ppl_ratio": (math.exp(0.05) + math.exp(0.5)) / 2,
            "ess": (sum(rho) / 4) ** 2 / mean_square,
            "chi2_token": mean_square - 1,
            "chi2_sequence": (math.exp(-0.2) + math.exp(-2.0)) / 2 - 1,
        }
    )


def test_kl_and_k3_estimate_the_divergence_from_server_to_trainer():
    """With tokens sampled from mu, both estimates approach KL(mu || pi_old), which differs from KL(pi_old || mu) here."""
    mu = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    pi_old = torch.tensor([0.3, 0.2, 0.5], dtype=torch.float64)
    tokens = torch.multinomial(mu, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([0, len(tokens)])
    metrics = mismatch_metrics(pi_old.log()[tokens], mu.log()[tokens], torch.ones(len(tokens)), bounds)
    forward = float((mu * (mu / pi_old).log()).sum())
    backward = float((pi_old * (pi_old / mu).log()).sum())
    assert metrics["kl"] == pytest.approx(forward, abs=0.01)
    assert metrics["k3"] == pytest.approx(forward, abs=0.02)
    assert abs(forward - backward) > 0.05


def test_mismatch_clamps_log_ratios_and_ignores_masked_nan():
    old = torch.tensor([0.0, -500.0, torch.nan, 0.0, -torch.inf])
    rollout = torch.tensor([-500.0, 0.0, 0.0, 0.0, torch.nan])
    metrics = mismatch_metrics(old, rollout, torch.tensor([1, 1, 0, 1, 0]), BOUNDS)
    assert metrics["max_abs_log_ratio"] == 20.0
    assert all(math.isfinite(number) for number in metrics.values())


def test_mismatch_metrics_accept_empty_batches():
    nothing = torch.zeros(0)
    assert mismatch_metrics(nothing, nothing, nothing, torch.tensor([0]))["ess"] == 1.0


def test_mismatch_metrics_reject_bad_arguments_by_name():
    with pytest.raises(ValueError, match="rollout_logprobs: expected the same form as old_logprobs"):
        mismatch_metrics(torch.zeros(5), torch.zeros(4), torch.ones(5), BOUNDS)
    with pytest.raises(ValueError, match="number of tokens 4, got 5"):
        mismatch_metrics(torch.zeros(4), torch.zeros(4), torch.ones(4), BOUNDS)
