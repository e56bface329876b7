"""ReMax: the greedy response's reward is the baseline."""

import pytest
import torch
from hypothesis import given

from megatron_rl.algorithms import remax_advantages
from megatron_rl.algorithms.advantages import Episodes, estimate_advantages
from tests.unit.algorithms.ragged import Ragged, ragged


@given(ragged())
def test_remax_is_reward_to_go_minus_the_greedy_reward(batch: Ragged):
    rewards = torch.randn(batch.num_tokens, generator=batch.generator, dtype=torch.float64)
    baselines = batch.uniform_of_sequence()
    found = remax_advantages(rewards, baselines, batch.cu_seqlens)
    for i, (start, end) in enumerate(zip(batch.cu_seqlens.tolist(), batch.cu_seqlens[1:].tolist())):
        for t in range(start, end):
            expected = sum(rewards[t:end].tolist()) - float(baselines[i])
            assert float(found[t]) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_remax_matches_hand_computed_values():
    """Outcome 1 with a KL penalty of 0.1 per token and greedy reward 0.25; a wrong response with a correct greedy one."""
    rewards = torch.tensor([-0.1, 0.9, 0.0])
    found = remax_advantages(rewards, torch.tensor([0.25, 1.0]), torch.tensor([0, 2, 3]))
    torch.testing.assert_close(found, torch.tensor([0.55, 0.65, -1.0]))


def test_remax_is_registered():
    bounds, flags = torch.tensor([0, 2, 3]), torch.ones(2, dtype=torch.bool)
    ids, baselines = torch.arange(2), torch.tensor([0.5, 0.0])
    episodes = Episodes(torch.ones(3), bounds, flags, flags, ids, gamma=1.0, lam=1.0, baselines=baselines)
    assert estimate_advantages("remax", {}, episodes).tolist() == [1.5, 0.5, 1.0]


def test_remax_rejects_other_numbers_of_baselines():
    with pytest.raises(ValueError, match="baselines"):
        remax_advantages(torch.ones(3), torch.ones(3), torch.tensor([0, 2, 3]))
