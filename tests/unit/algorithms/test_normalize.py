"""Laws of advantage normalization, also by role of a dialogue, and of the boundary mask."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms import boundary_mask, egae, gae, monte_carlo_returns, normalize_advantages, role_normalize
from tests.unit.algorithms.ragged import Ragged, assert_close, ragged


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalization_uses_masked_tokens_only(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    advantages = (torch.randn(1000, generator=generator, dtype=torch.float64) * 3 + 2).to(dtype)
    mask = torch.rand(1000, generator=generator) < 0.5
    poisoned = torch.where(mask, advantages, torch.nan)
    whitened = normalize_advantages(poisoned, mask, kind="whiten")
    assert whitened.dtype == dtype and (whitened[~mask] == 0).all()
    assert whitened[mask].mean().abs() < 1e-6
    assert (whitened[mask].std(correction=0) - 1).abs() < 1e-6
    scaled = normalize_advantages(poisoned, mask, kind="scale")
    torch.testing.assert_close(scaled[mask], advantages[mask] / advantages[mask].std(correction=0))
    plain = normalize_advantages(poisoned, mask, kind="none")
    assert torch.equal(plain[mask], advantages[mask]) and (plain[~mask] == 0).all()


def test_scale_keeps_zeros_and_whiten_does_not():
    advantages = torch.tensor([0.0, 1.0, 3.0])
    assert normalize_advantages(advantages, torch.ones(3), kind="scale")[0] == 0
    assert normalize_advantages(advantages, torch.ones(3), kind="whiten")[0] < 0


@pytest.mark.parametrize("kind", ["none", "scale", "whiten"])
@pytest.mark.parametrize("advantages", [[], [0.3], [0.1] * 7, [0.0] * 4])
def test_constant_advantages_stay_finite_when_normalized(kind: str, advantages: list[float]):
    given_advantages = torch.tensor(advantages)
    result = normalize_advantages(given_advantages, torch.ones(len(advantages)), kind=kind)
    expected = torch.zeros_like(given_advantages) if kind == "whiten" else given_advantages
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-7)


def test_whitening_an_empty_mask_gives_zeros():
    assert (normalize_advantages(torch.full((3,), torch.nan), torch.zeros(3), kind="whiten") == 0).all()


def test_clamp_bounds_normalized_advantages():
    advantages = torch.tensor([0.0] * 999 + [100.0])
    result = normalize_advantages(advantages, torch.ones(1000), kind="scale", clamp=10.0)
    assert result.max() == 10.0
    assert normalize_advantages(advantages, torch.ones(1000), kind="scale").max() > 10.0


def test_normalize_advantages_rejects_bad_arguments():
    with pytest.raises(ValueError, match="kind: expected one of none, scale, whiten, got 'norm'"):
        normalize_advantages(torch.ones(2), torch.ones(2), kind="norm")
    with pytest.raises(ValueError, match="clamp: expected a finite number of at least 0"):
        normalize_advantages(torch.ones(2), torch.ones(2), kind="none", clamp=-1.0)


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=8), st.integers(0, 12))
def test_boundary_mask_excludes_last_tokens_of_unfinished_windows(rows: list[tuple[int, bool]], n_ignore: int):
    expected = []
    for length, finished in rows:
        ignored = 0 if finished else min(n_ignore, length)
        expected += [True] * (length - ignored) + [False] * ignored
    bounds = torch.tensor([0] + [length for length, _ in rows]).cumsum(0)
    flags = torch.tensor([finished for _, finished in rows], dtype=torch.bool)
    for dtype in (torch.bool, torch.int64, torch.float32):
        assert boundary_mask(bounds, flags.to(dtype), n_ignore).tolist() == expected
    assert boundary_mask(bounds.int(), flags, n_ignore).dtype == torch.bool


def test_boundary_mask_of_zero_tokens_masks_nothing():
    """Guards against an error of a public port, which slices with [-0:] and masks the whole window."""
    assert boundary_mask(torch.tensor([0, 5, 9]), torch.zeros(2), 0).all()


def test_windows_train_each_token_once_except_ignored_tokens():
    """A response of 20 tokens in windows of 8, 8 and 4: both unfinished windows lose n_ignore tokens."""
    trained = boundary_mask(torch.tensor([0, 8, 16, 20]), torch.tensor([0, 0, 1]), 3)
    assert int(trained.sum()) == 20 - 2 * 3
    assert trained.nonzero().squeeze(1).tolist() == [0, 1, 2, 3, 4, 8, 9, 10, 11, 12, 16, 17, 18, 19]


def test_boundary_mask_rejects_bad_arguments():
    with pytest.raises(ValueError, match="n_ignore: expected a whole number"):
        boundary_mask(torch.tensor([0, 5]), torch.zeros(1), -1)
    with pytest.raises(ValueError, match=r"finished: expected a tensor of shape \[1\]"):
        boundary_mask(torch.tensor([0, 5]), torch.zeros(2), 1)


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
