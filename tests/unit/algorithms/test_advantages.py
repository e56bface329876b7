"""Laws of GAE, EGAE, returns and lambdas, against loops in float64."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.algorithms import egae, gae, length_adaptive_lambda, monte_carlo_returns

VALUES = torch.tensor([0.2, 0.4, 0.5, 0.6], dtype=torch.float64)
LONG_VALUES = torch.tensor([0.2, 0.4, 0.5, 0.6, 0.55, 0.7, 0.8, 0.9], dtype=torch.float64)
CUT, FINISHED = torch.tensor([False]), torch.tensor([True])


def cu(*lengths: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *lengths], dtype=dtype).cumsum(0, dtype=dtype)


def last_reward(length: int, reward: float) -> Tensor:
    rewards = torch.zeros(length, dtype=torch.float64)
    rewards[-1] = reward
    return rewards


def egae_by_loop(
    rewards: Tensor,
    values: Tensor,
    bounds: Tensor,
    finished: Tensor,
    gamma: float,
    lam: Tensor,
    bootstrap: Tensor | None = None,
) -> Tensor:
    """The definition, one token at a time, in Python floats."""
    rewards, values = rewards.tolist(), values.tolist()
    advantages = [0.0] * len(rewards)
    for sequence, (start, end) in enumerate(zip(bounds.tolist(), bounds.tolist()[1:])):
        following = 0.0
        for token in reversed(range(start, end)):
            if token < end - 1:
                next_value = values[token + 1]
            elif finished[sequence]:
                next_value = 0.0
            else:
                next_value = values[token] if bootstrap is None else float(bootstrap[sequence])
            delta = rewards[token] + gamma * next_value - values[token]
            following = delta + gamma * float(lam[sequence]) * following
            advantages[token] = following
    return torch.tensor(advantages, dtype=torch.float64)


@st.composite
def packed(draw: st.DrawFn) -> dict:
    """Ragged batches of 0 to 12 sequences of 0 to 300 tokens, with all that EGAE takes."""
    lengths = draw(st.lists(st.integers(0, 300), max_size=12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    total, count = sum(lengths), len(lengths)
    lam = torch.rand(count, generator=generator, dtype=torch.float64)
    return {
        "rewards": torch.randn(total, generator=generator, dtype=torch.float64),
        "values": torch.randn(total, generator=generator, dtype=torch.float64),
        "bounds": cu(*lengths),
        "finished": torch.rand(count, generator=generator) < 0.5,
        "gamma": draw(st.sampled_from([1.0, 0.99, 0.5, 0.0])),
        "lam": torch.where(torch.rand(count, generator=generator) < 0.5, 0.95 + 0.05 * lam, lam),
        "bootstrap": torch.randn(count, generator=generator, dtype=torch.float64),
    }


def assert_close(actual: Tensor, expected: Tensor | list[float], rtol: float = 1e-12, atol: float = 1e-12) -> None:
    """Compare in float64, so that expected values in a list keep all digits."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)


class TestGoldenVectors:
    def test_gae_of_a_finished_response(self):
        advantages = gae(last_reward(4, 1.0), VALUES, cu(4), lam=0.95)
        assert_close(advantages, [0.7282, 0.556, 0.48, 0.4])

    @pytest.mark.parametrize(
        "gamma, lam, expected, atol",
        [
            (1.0, 0.95, [0.38525, 0.195, 0.1, 0.0], 1e-12),
            (1.0, 1.0, [0.4, 0.2, 0.1, 0.0], 1e-12),
            (0.99, 0.95, [0.363503, 0.1781, 0.088357, -0.006], 5e-7),
        ],
    )
    def test_egae_of_an_unfinished_window(self, gamma: float, lam: float, expected: list[float], atol: float):
        advantages = egae(torch.zeros_like(VALUES), VALUES, cu(4), CUT, gamma=gamma, lam=lam)
        assert_close(advantages, expected, atol=atol)

    def test_one_pass_and_two_windows_of_a_response(self):
        rewards = last_reward(8, 1.0)
        whole = gae(rewards, LONG_VALUES, cu(8), lam=0.95)
        expected = [0.685278, 0.510819, 0.432441, 0.349938, 0.420987, 0.28525, 0.195, 0.1]
        assert_close(whole, expected, atol=5e-7)
        first = egae(rewards[:4], LONG_VALUES[:4], cu(4), CUT, lam=0.95)
        assert_close(first, [0.38525, 0.195, 0.1, 0.0])
        second = egae(rewards[4:], LONG_VALUES[4:], cu(4), FINISHED, lam=0.95)
        assert_close(second, whole[4:])

    def test_terminal_reward_with_a_zero_critic(self):
        advantages = gae(last_reward(5, 1.0), torch.zeros(5, dtype=torch.float64), cu(5), lam=0.95)
        assert_close(advantages, [0.95**4, 0.95**3, 0.9025, 0.95, 1.0])

    def test_length_adaptive_lambda(self):
        lengths = torch.tensor([1000, 4096, 8192, 24576, 400, 100, 1, 0])
        expected = [0.98, 0.99512, 0.99756, 0.99919, 0.95, 0.95, 0.95, 0.95]
        assert_close(length_adaptive_lambda(lengths), expected, atol=5e-6)
        assert_close(length_adaptive_lambda(torch.tensor([100]), floor=0.0), [0.8])


@settings(max_examples=25, deadline=None)
@given(packed())
def test_egae_equals_its_definition_in_float64(batch: dict):
    for bootstrap in (None, batch["bootstrap"]):
        common = (batch["rewards"], batch["values"], batch["bounds"], batch["finished"])
        actual = egae(*common, gamma=batch["gamma"], lam=batch["lam"], bootstrap=bootstrap)
        assert_close(actual, egae_by_loop(*common, batch["gamma"], batch["lam"], bootstrap), atol=1e-11)


@settings(max_examples=15, deadline=None)
@given(packed())
def test_egae_in_float32_is_close_to_its_definition(batch: dict):
    rewards, values = batch["rewards"].float(), batch["values"].float()
    actual = egae(rewards, values, batch["bounds"], batch["finished"], gamma=batch["gamma"], lam=batch["lam"])
    assert actual.dtype == torch.float32
    expected = egae_by_loop(rewards, values, batch["bounds"], batch["finished"], batch["gamma"], batch["lam"])
    assert_close(actual, expected, rtol=1e-5, atol=1e-4)


def test_egae_in_float32_does_not_drift_on_long_sequences():
    generator = torch.Generator().manual_seed(3)
    rewards, values = (torch.randn(24576, generator=generator) for _ in range(2))
    lam = length_adaptive_lambda(torch.tensor([24576]))
    exact = gae(rewards.double(), values.double(), cu(24576), lam=lam)
    error = (gae(rewards, values, cu(24576), lam=lam).double() - exact).abs().max()
    assert error < 1e-5 * exact.abs().max()


@settings(max_examples=25, deadline=None)
@given(packed())
def test_egae_equals_gae_bit_for_bit_on_finished_responses(batch: dict):
    everyone = torch.ones_like(batch["finished"])
    for dtype, lam in itertools.product((torch.float32, torch.float64), (batch["lam"], 0.95)):
        rewards, values = batch["rewards"].to(dtype), batch["values"].to(dtype)
        options = {"gamma": batch["gamma"], "lam": lam}
        plain = gae(rewards, values, batch["bounds"], **options)
        assert torch.equal(plain, egae(rewards, values, batch["bounds"], everyone, **options))
        never_read = torch.full_like(batch["lam"], torch.nan)
        assert torch.equal(plain, egae(rewards, values, batch["bounds"], everyone, bootstrap=never_read, **options))


@settings(max_examples=25, deadline=None)
@given(packed())
def test_last_advantage_of_an_unrewarded_unfinished_window_is_zero(batch: dict):
    values = batch["values"].float()
    bounds = batch["bounds"]
    cut = torch.zeros_like(batch["finished"])
    advantages = egae(torch.zeros_like(values), values, bounds, cut, lam=batch["lam"])
    last_tokens = bounds[1:][bounds[1:] > bounds[:-1]] - 1
    assert (advantages[last_tokens] == 0).all()


@pytest.mark.parametrize("one_lambda", [True, False])
def test_advantages_of_a_window_do_not_depend_on_other_windows(one_lambda: bool):
    generator = torch.Generator().manual_seed(5)
    lengths = (70, 0, 330, 64, 1, 800)
    bounds = cu(*lengths)
    total = sum(lengths)
    rewards, values = (torch.randn(total, generator=generator, dtype=torch.float64) for _ in range(2))
    finished = torch.tensor([1, 0, 0, 1, 0, 0])
    lam = 0.97 if one_lambda else torch.full((6,), 0.97)
    before = egae(rewards, values, bounds, finished, lam=lam)
    for sequence in range(len(lengths)):
        disturbed = values.clone()
        disturbed[bounds[sequence] : bounds[sequence + 1]] = torch.nan
        after = egae(rewards, disturbed, bounds, finished, lam=lam)
        inside = torch.zeros(total, dtype=torch.bool)
        inside[bounds[sequence] : bounds[sequence + 1]] = True
        assert torch.equal(after[~inside], before[~inside])
        assert after[inside].isnan().all()


def test_constant_critic_gives_unfinished_windows_zero_advantage():
    values = torch.full((100,), 0.7)
    assert (egae(torch.zeros(100), values, cu(100), CUT, lam=0.95) == 0).all()


def test_reward_on_the_last_token_of_an_unfinished_window_counts():
    """Guards against an error of a public port, which drops this reward."""
    advantages = egae(last_reward(4, 1.0), VALUES, cu(4), CUT, lam=0.95)
    assert advantages[-1] == 1.0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
def test_egae_accepts_finished_flags_of_any_dtype(dtype: torch.dtype):
    """Guards against an error of a public port, which inverts integer flags bitwise: the boundary value is scaled by -1 or -2."""
    values = torch.cat([VALUES, VALUES])
    flags = torch.tensor([1, 0]).to(dtype)
    advantages = egae(torch.zeros_like(values), values, cu(4, 4), flags, gamma=0.9, lam=0.95)
    assert_close(advantages[[3, 7]], [-0.6, -0.06])


def test_bootstrap_is_the_value_after_an_unfinished_window():
    after_cut = torch.tensor([0.9], dtype=torch.float64)
    advantages = egae(torch.zeros_like(VALUES), VALUES, cu(4), CUT, lam=0.95, bootstrap=after_cut)
    assert_close(advantages[-1:], [0.9 - 0.6])


@settings(max_examples=25, deadline=None)
@given(packed())
def test_returns_are_discounted_rewards_to_go(batch: dict):
    zeros = torch.zeros_like(batch["values"])
    everyone, full = torch.ones_like(batch["finished"]), torch.ones_like(batch["lam"])
    expected = egae_by_loop(batch["rewards"], zeros, batch["bounds"], everyone, batch["gamma"], full)
    assert_close(monte_carlo_returns(batch["rewards"], batch["bounds"], gamma=batch["gamma"]), expected, atol=1e-11)


def test_undiscounted_target_is_the_terminal_reward_on_every_token():
    rewards = torch.cat([last_reward(1000, 1.0), last_reward(70, -1.0)]).float()
    returns = monte_carlo_returns(rewards, cu(1000, 70))
    assert (returns[:1000] == 1.0).all() and (returns[1000:] == -1.0).all()


def test_gae_with_lambda_one_is_return_minus_value():
    generator = torch.Generator().manual_seed(1)
    rewards, values = (torch.randn(500, generator=generator, dtype=torch.float64) for _ in range(2))
    bounds = cu(200, 300)
    expected = monte_carlo_returns(rewards, bounds, gamma=0.98) - values
    assert_close(gae(rewards, values, bounds, gamma=0.98, lam=1.0), expected, atol=1e-11)


def test_scalar_lambda_equals_one_lambda_per_sequence():
    generator = torch.Generator().manual_seed(2)
    rewards, values = (torch.randn(300, generator=generator, dtype=torch.float64) for _ in range(2))
    scalar = gae(rewards, values, cu(100, 200), lam=0.95)
    for lam in (torch.tensor([0.95, 0.95], dtype=torch.float64), torch.tensor(0.95, dtype=torch.float64)):
        assert_close(gae(rewards, values, cu(100, 200), lam=lam), scalar)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_advantages_of_empty_batches_are_empty(index_dtype: torch.dtype):
    nothing = torch.zeros(0)
    for lengths in ((), (0,), (0, 0, 0)):
        bounds, flags = cu(*lengths, dtype=index_dtype), torch.zeros(len(lengths))
        assert gae(nothing, nothing, bounds, lam=0.9).shape == (0,)
        assert egae(nothing, nothing, bounds, flags, lam=flags, bootstrap=flags).shape == (0,)
        assert egae(nothing, nothing, bounds, flags, lam=0.5).shape == (0,)
        assert monte_carlo_returns(nothing, bounds).shape == (0,)


def test_advantages_carry_no_gradient_and_do_not_change_inputs():
    rewards, values = torch.zeros(4).double(), VALUES.clone().requires_grad_()
    assert not egae(rewards, values, cu(4), CUT, lam=0.95).requires_grad
    assert torch.equal(values.detach(), VALUES) and (rewards == 0).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rewards": torch.zeros(4, dtype=torch.int64)}, "rewards: expected a 1-D float32 or float64"),
        ({"rewards": torch.zeros(2, 2)}, "rewards: expected a 1-D"),
        ({"values": torch.zeros(5)}, r"values: expected the same form as rewards.*got.*\[5\]"),
        ({"values": torch.zeros(4, dtype=torch.bfloat16)}, "bfloat16"),
        ({"values": torch.zeros(4, dtype=torch.float64)}, "float64"),
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, "cu_seqlens: expected a 1-D int32 or int64"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "number of tokens 4, got 3"),
        ({"cu_seqlens": torch.tensor([1, 4])}, "the first of them 0"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int64)}, "N\\+1 entries"),
        ({"cu_seqlens": torch.tensor([0, 3, 2, 4])}, "never decrease, got 3 then 2 at sequence 1"),
        ({"finished": torch.ones(2)}, r"finished: expected a tensor of shape \[1\]"),
        ({"lam": torch.ones(2)}, r"lam: expected a tensor of shape \[1\]"),
        ({"lam": 1.5}, r"lam: expected a number within \[0, 1\], got 1.5"),
        ({"lam": torch.tensor([float("nan")])}, r"lam: expected numbers within \[0, 1\]"),
        ({"gamma": -0.1}, r"gamma: expected a number within \[0, 1\]"),
        ({"bootstrap": torch.ones(3)}, r"bootstrap: expected a tensor of shape \[1\]"),
    ],
)
def test_egae_rejects_bad_arguments_by_name(change: dict, message: str):
    fitting = {
        "rewards": torch.zeros(4),
        "values": torch.zeros(4),
        "cu_seqlens": torch.tensor([0, 4]),
        "finished": torch.ones(1),
        "lam": 0.95,
    }
    egae(**fitting)
    with pytest.raises(ValueError, match=message):
        egae(**(fitting | change))


class TestLengthAdaptiveLambda:
    @given(st.integers(0, 40000))
    def test_equals_its_definition(self, length: int):
        raw = 1 - 1 / (0.05 * length) if length else float("-inf")
        assert_close(length_adaptive_lambda(torch.tensor([length])), [min(max(raw, 0.95), 1.0)])

    def test_rejects_bad_arguments(self):
        with pytest.raises(ValueError, match="alpha: expected a number above 0"):
            length_adaptive_lambda(torch.tensor([1]), alpha=0.0)
        with pytest.raises(ValueError, match="lengths: expected a 1-D integer or float"):
            length_adaptive_lambda(torch.tensor([[1]]))
