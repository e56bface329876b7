"""Laws of dialogues: independent turns, the bonus for a better answer, normalization by role (PAG)."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms import (
    egae,
    gae,
    monte_carlo_returns,
    normalize_advantages,
    role_normalize,
)
from tests.unit.algorithms.ragged import Ragged, assert_close, ragged


@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=5), st.integers(0, 2**31), st.sampled_from([1.0, 0.9]), st.data()
)
def test_rewards_of_a_later_turn_leave_earlier_turns_unchanged(
    turns: list[int], seed: int, gamma: float, data: st.DataObject
):
    generator = torch.Generator().manual_seed(seed)
    bounds = torch.tensor([0, *turns]).cumsum(0)
    rewards, values = torch.randn(2, int(bounds[-1]), generator=generator, dtype=torch.float64)
    border = int(bounds[data.draw(st.integers(1, len(turns) - 1))])
    perturbed = rewards.clone()
    perturbed[border:] += 1 + torch.rand(len(rewards) - border, generator=generator, dtype=torch.float64)
    finished = torch.ones(len(turns), dtype=torch.bool)
    finished[-1] = data.draw(st.booleans())
    for estimate in (
        lambda r: gae(r, values, bounds, gamma=gamma, lam=0.95),
        lambda r: egae(r, values, bounds, finished, gamma=gamma, lam=0.95),
        lambda r: monte_carlo_returns(r, bounds, gamma=gamma),
    ):
        before, after = estimate(rewards), estimate(perturbed)
        assert torch.equal(before[:border], after[:border])
        assert not torch.equal(before[border:], after[border:])
    # As one episode, the earlier turn does change: independence comes from cutting cu_seqlens at the turns.
    whole = torch.tensor([0, len(rewards)])
    assert (monte_carlo_returns(rewards, whole) != monte_carlo_returns(perturbed, whole))[:border].all()


class TestRoleNormalize:
    @given(ragged(max_length=30), st.integers(1, 3))
    def test_whitens_each_role_separately(self, batch: Ragged, num_roles: int):
        advantages = batch.normal(3.0)
        roles = torch.randint(0, num_roles, (batch.num_tokens,), generator=batch.generator) * 7 - 7
        found = role_normalize(advantages, batch.mask, roles)
        assert (found[~batch.mask] == 0).all()
        for role in roles.unique():
            own = batch.mask & (roles == role)
            numbers = advantages[own].tolist()
            if len(numbers) > 1:
                mean, deviation = statistics.fmean(numbers), statistics.pstdev(numbers)
                assert_close(found[own], [(x - mean) / deviation for x in numbers], 1e-7)
            else:
                assert (found[own] == 0).all()

    def test_single_role_equals_plain_whitening(self):
        advantages, mask = torch.randn(20, generator=torch.Generator().manual_seed(0)), torch.ones(20)
        plain = normalize_advantages(advantages, mask, kind="whiten", clamp=1.0)
        assert torch.equal(role_normalize(advantages, mask, torch.zeros(20).long(), clamp=1.0), plain)

    def test_the_easier_role_does_not_set_the_scale(self):
        advantages = torch.tensor([100.0, 300.0, 1.0, 3.0])
        assert role_normalize(advantages, torch.ones(4), torch.tensor([0, 0, 1, 1])).tolist() == [-1, 1, -1, 1]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_constant_roles_get_zeros_and_absent_roles_no_nan(self, dtype: torch.dtype):
        advantages = torch.tensor([0.1] * 7 + [1.0, 2.0], dtype=dtype)
        mask = torch.tensor([True] * 7 + [False, False])
        found = role_normalize(advantages, mask, torch.tensor([4] * 7 + [5, 5]))
        assert found.dtype == dtype and (found == 0).all()
        assert role_normalize(torch.zeros(0), torch.zeros(0), torch.zeros(0).long()).shape == (0,)

    def test_rejects_roles_of_other_shapes_or_dtypes(self):
        for roles in (torch.zeros(2).long(), torch.zeros(3)):
            with pytest.raises(ValueError, match=r"roles: expected an int32 or int64 tensor of shape \[3\]"):
                role_normalize(torch.zeros(3), torch.ones(3), roles)
