"""Laws of the advantages without a critic: groups, leave-one-out, REINFORCE++, ReMax, against Python loops."""

import itertools
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms import (
    group_advantages,
    kl_penalized_rewards,
    reinforce_pp_advantages,
    remax_advantages,
    rloo_advantages,
)
from megatron_rl.algorithms.advantages import Episodes, estimate_advantages
from tests.unit.algorithms.ragged import Ragged, assert_close, ragged

FORMS = {
    "std": group_advantages,
    "mean": lambda *args, **options: group_advantages(*args, scale_by_std=False, **options),
    "rloo": rloo_advantages,
}
Row = tuple[int, float, bool]
ROWS = st.lists(
    st.tuples(st.sampled_from([-7, 0, 3, 10**12]), st.sampled_from([-1.0, 0.1, 0.3, 1.0]), st.booleans()), max_size=40
)


def brute_force(rows: list[Row], form: str) -> list[float]:
    expected = []
    for group, reward, is_valid in rows:
        members = [r for g, r, valid in rows if g == group and valid]
        if not is_valid or len(set(members)) < 2:
            expected.append(0.0)
        elif form == "rloo":
            expected.append(reward - (sum(members) - reward) / (len(members) - 1))
        else:
            centred = reward - statistics.fmean(members)
            expected.append(centred / statistics.stdev(members) if form == "std" else centred)
    return expected


@pytest.mark.parametrize("form", FORMS)
class TestComparedInGroups:
    @settings(max_examples=60)
    @given(rows=ROWS)
    def test_equals_its_definition_over_valid_responses(self, form: str, rows: list[Row]):
        groups = torch.tensor([group for group, _, _ in rows], dtype=torch.int64)
        valid = torch.tensor([is_valid for _, _, is_valid in rows], dtype=torch.bool)
        rewards = torch.tensor([reward for _, reward, _ in rows], dtype=torch.float64)
        # Unscored responses may have any reward.
        found = FORMS[form](torch.where(valid, rewards, torch.nan), groups, valid=valid)
        assert_close(found, brute_force(rows, form))

    @given(rows=ROWS)
    def test_unscored_responses_do_not_change_the_others(self, form: str, rows: list[Row]):
        kept = [row for row in rows if row[2]]
        found = [
            FORMS[form](torch.tensor([r for _, r, _ in some]), torch.tensor([g for g, _, _ in some]).long(), valid=mask)
            for some, mask in ((rows, torch.tensor([valid for _, _, valid in rows]).bool()), (kept, None))
        ]
        assert [float(x) for x, row in zip(found[0], rows) if row[2]] == found[1].tolist()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_equal_rewards_and_groups_of_one_give_exactly_zero(self, form: str, dtype: torch.dtype):
        rewards = torch.tensor([0.1] * 7 + [5.0], dtype=dtype)
        groups = torch.tensor([2] * 7 + [9], dtype=torch.int32)
        found = FORMS[form](rewards, groups)
        assert found.dtype == dtype and (found == 0).all()

    def test_group_with_one_valid_member_gives_exactly_zero(self, form: str):
        found = FORMS[form](torch.tensor([1.0, 0.0]), torch.zeros(2).long(), valid=torch.tensor([1, 0]))
        assert found.tolist() == [0.0, 0.0]

    @given(rows=ROWS)
    def test_advantages_of_a_group_sum_to_zero(self, form: str, rows: list[Row]):
        groups = torch.tensor([group for group, _, _ in rows], dtype=torch.int64)
        found = FORMS[form](torch.tensor([reward for _, reward, _ in rows], dtype=torch.float64), groups)
        for group in set(groups.tolist()):
            assert abs(float(found[groups == group].sum())) < 1e-12

    def test_accepts_empty_batches(self, form: str):
        assert FORMS[form](torch.zeros(0), torch.zeros(0).long(), valid=torch.zeros(0)).shape == (0,)
        assert FORMS[form](torch.ones(2), torch.zeros(2).long(), valid=torch.zeros(2)).tolist() == [0.0, 0.0]

    def test_rejects_other_shapes(self, form: str):
        for group_ids in (torch.zeros(2, dtype=torch.int64), torch.zeros(3)):
            with pytest.raises(ValueError, match="group_ids: expected an int32 or int64"):
                FORMS[form](torch.ones(3), group_ids)
        with pytest.raises(ValueError, match=r"valid: expected a tensor of shape \[3\]"):
            FORMS[form](torch.ones(3), torch.zeros(3).long(), valid=torch.ones(2))


def test_group_advantages_match_hand_computed_values():
    rewards, groups = torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=torch.float64), torch.zeros(4).long()
    assert_close(group_advantages(rewards, groups), [0.5, -1.5, 0.5, 0.5])
    assert_close(group_advantages(rewards, groups, scale_by_std=False), [0.5, -1.5, 0.5, 0.5])
    assert_close(rloo_advantages(rewards, groups), [2 / 3, -2.0, 2 / 3, 2 / 3])


class TestReinforcePlusPlus:
    @given(batch=ragged(), with_baseline=st.booleans())
    def test_equals_the_whitened_reward_to_go(self, batch: Ragged, with_baseline: bool):
        # Rewards are on tokens outside the mask also; they count for trained responses.
        rewards = batch.normal(junk=0.5)
        groups = torch.randint(0, 3, (batch.num_sequences,), generator=batch.generator)
        trained = [n for n, tokens in enumerate(batch.counted()) if tokens]
        corners = batch.cu_seqlens.tolist()
        to_go, outcomes = {}, {}
        for n in trained:
            later = 0.0
            for t in reversed(range(corners[n], corners[n + 1])):
                later += float(rewards[t])
                to_go[t] = (later, n)
            outcomes[n] = later
        advantages = []
        for t in (t for tokens in batch.counted() for t in tokens):
            others = [outcomes[n] for n in trained if groups[n] == groups[to_go[t][1]]]
            advantages.append(to_go[t][0] - (statistics.fmean(others) if with_baseline else 0.0))
        if advantages:
            mean, deviation = statistics.fmean(advantages), statistics.pstdev(advantages)
            advantages = [(a - mean) / deviation if deviation > 1e-8 else 0.0 for a in advantages]
        found = reinforce_pp_advantages(
            rewards, batch.mask, batch.cu_seqlens, group_ids=groups if with_baseline else None
        )
        assert_close(found[batch.mask], advantages, 1e-7)
        assert (found[~batch.mask] == 0).all()

    def test_unscored_responses_enter_no_statistic(self):
        bounds, groups = torch.tensor([0, 2, 4, 6]), torch.zeros(3).long()
        mask = torch.tensor([1, 1, 1, 1, 0, 0])
        rewards = torch.tensor([0.0, 1.0, 0.0, -1.0, torch.nan, torch.nan])
        for group_ids in (None, groups):
            found = reinforce_pp_advantages(rewards, mask, bounds, group_ids=group_ids)
            torch.testing.assert_close(found, torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0, 0.0]))

    def test_penalty_affects_earlier_tokens_only(self):
        bounds, mask = torch.tensor([0, 3, 6]), torch.ones(6)
        rewards = torch.tensor([0.0, -0.5, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
        found = reinforce_pp_advantages(rewards, mask, bounds)
        assert found[0] == found[1] < found[2] and (found[3:] == found[3]).all()
        torch.testing.assert_close(found.mean(), torch.tensor(0.0, dtype=torch.float64))

    def test_equal_outcomes_give_zero_with_a_baseline(self):
        rewards, groups = torch.tensor([0.3, 0.3, 0.3, 0.9]), torch.tensor([5, 5, 5, 8])
        bounds = torch.tensor([0, 1, 2, 3, 4])
        assert (reinforce_pp_advantages(rewards, torch.ones(4), bounds, group_ids=groups) == 0).all()

    def test_results_keep_the_dtype_and_carry_no_gradient(self):
        rewards = torch.rand(3, requires_grad=True)
        found = reinforce_pp_advantages(rewards, torch.ones(3), torch.tensor([0, 3]))
        assert found.dtype == torch.float32 and not found.requires_grad

    def test_accepts_batches_without_tokens(self):
        for bounds in (torch.tensor([0]), torch.tensor([0, 0])):
            groups = torch.zeros(len(bounds) - 1).long()
            assert reinforce_pp_advantages(torch.zeros(0), torch.zeros(0), bounds, group_ids=groups).shape == (0,)


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


def test_immediate_advantages_of_a_teacher_have_the_gradient_of_the_reverse_kl_at_every_state():
    """Exact expectation over all sequences: 3 tokens of 4, a policy and a teacher that depend on the tokens before."""
    generator = torch.Generator().manual_seed(3)
    states = [prefix for length in range(3) for prefix in itertools.product(range(4), repeat=length)]
    logits = {state: torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True) for state in states}
    teacher = {state: torch.randn(4, generator=generator, dtype=torch.float64).log_softmax(0) for state in states}
    policy = {state: logits[state].log_softmax(0) for state in states}
    surrogate = expected = torch.zeros((), dtype=torch.float64)
    for tokens in itertools.product(range(4), repeat=3):
        visited = [(tokens[:t], tokens[t]) for t in range(3)]
        logprobs = torch.stack([policy[state][token] for state, token in visited])
        reference = torch.stack([teacher[state][token] for state, token in visited])
        ones = torch.ones(3, dtype=torch.float64)
        rewards = kl_penalized_rewards(0 * ones, logprobs.detach(), reference, ones, ones)
        whole = torch.ones(1, dtype=torch.bool)
        episodes = Episodes(rewards, torch.tensor([0, 3]), ~whole, whole, torch.zeros(1, dtype=torch.int64), gamma=1.0, lam=1.0)
        advantages = estimate_advantages("immediate", {}, episodes)
        surrogate = surrogate - logprobs.sum().detach().exp() * (advantages * logprobs).sum()
    for state in states:
        reached = sum(policy[state[:t]][token].detach() for t, token in enumerate(state))
        divergence = (policy[state].exp() * (policy[state] - teacher[state])).sum()
        expected = expected + torch.as_tensor(reached, dtype=torch.float64).exp() * divergence
    leaves = list(logits.values())
    for one, other in zip(torch.autograd.grad(surrogate, leaves, retain_graph=True), torch.autograd.grad(expected, leaves), strict=True):
        assert_close(one, other)


def test_remax_is_registered():
    bounds, flags = torch.tensor([0, 2, 3]), torch.ones(2, dtype=torch.bool)
    ids, baselines = torch.arange(2), torch.tensor([0.5, 0.0])
    episodes = Episodes(torch.ones(3), bounds, flags, flags, ids, gamma=1.0, lam=1.0, baselines=baselines)
    assert estimate_advantages("remax", {}, episodes).tolist() == [1.5, 0.5, 1.0]


def test_remax_rejects_other_numbers_of_baselines():
    with pytest.raises(ValueError, match="baselines"):
        remax_advantages(torch.ones(3), torch.ones(3), torch.tensor([0, 2, 3]))
