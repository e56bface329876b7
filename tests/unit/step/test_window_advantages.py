"""The tokens that train each model: invariants of T-PPO (arXiv 2506.15050) between pool and losses."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl import algorithms
from megatron_rl.algorithms.advantages import Episodes, estimate_advantages
from megatron_rl.config.schedule_facts import facts_of
from megatron_rl.config.schema import (
    AlgorithmConfig,
    Bootstrap,
    Config,
    CorrectionConfig,
    LambdaKind,
    Normalization,
    OldPolicy,
    Overlong,
)
from megatron_rl.data.trajectory import Prompt, Score, Segment, Trajectory, message_segment
from megatron_rl.step.loss_batches import policy_batch, response_batch, store_model_outputs, window_critic_batch
from megatron_rl.step.metrics import advantage_metrics, reward_metrics, rollout_metrics, staleness_metrics
from megatron_rl.step.packing import window_batch
from megatron_rl.step.window_advantages import SINGLE_RESPONSE, ModelOutputs, ResponseRules, window_advantages

WINDOW = 4
RAW = AlgorithmConfig(
    lambda_policy=LambdaKind.constant,
    lambda_value=0.95,
    ignore_boundary_tokens=0,
    normalization=Normalization.none,
    advantage_clamp=0.0,
)


def trajectory(windows, *, stopped, score=None, prompt_tokens=3, budget=100, first_step=0, id=0, deferred=()):
    """A response whose window k has windows[k] tokens, generated in step first_step + k."""
    segments = [
        Segment((7,) * n, (-0.5,) * n, k, "stop" if stopped and k == len(windows) - 1 else "length", first_step + k)
        for k, n in enumerate(windows)
    ]
    prompt = Prompt(id="p", token_ids=(1,) * prompt_tokens)
    return Trajectory(id, prompt, 0, 0, budget, segments, score=score, deferred_steps=tuple(deferred))


def advantages(trajectories, step, window_values, algorithm=RAW, final=None, rules=SINGLE_RESPONSE):
    """window_values: the values of this step's tokens, all trajectories back to back."""
    batch = window_batch(trajectories, step)
    values = torch.zeros(len(batch.tokens))
    values[batch.fields["mask"]] = torch.tensor(window_values)
    final_values = torch.zeros(len(trajectories)) if final is None else torch.tensor(final)
    found = window_advantages(
        trajectories,
        batch,
        ModelOutputs(values, final_values),
        step=step,
        window_tokens=WINDOW,
        algorithm=algorithm,
        rules=rules,
    )
    return batch, found


def test_golden_vectors_of_a_response_over_two_windows():
    values = [0.2, 0.4, 0.5, 0.6, 0.55, 0.7, 0.8, 0.9]
    first = trajectory([4], stopped=False)
    batch, found = advantages([first], 0, values[:4])
    torch.testing.assert_close(found.advantages[batch.fields["mask"]], torch.tensor([0.38525, 0.195, 0.1, 0.0]))
    whole = trajectory([4, 4], stopped=True, score=Score(1.0))
    batch, found = advantages([whole], 1, values[4:])
    torch.testing.assert_close(
        found.advantages[batch.fields["mask"]], torch.tensor([0.420987, 0.28525, 0.195, 0.1]), atol=1e-6, rtol=0
    )


def brute_force(rewards, values, gamma, lam, edge):
    """A_t = sum_k (gamma lam)^k delta_{t+k} (T-PPO, arXiv 2506.15050, eq. 6) in float64; ``edge``: V after the last token."""
    following = [*values[1:], edge]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 5), min_size=3, max_size=6), min_size=1, max_size=5),
    st.frozensets(st.integers(0, 2)),
    st.sampled_from(Bootstrap),
    st.sampled_from([(1.0, 0.95), (0.97, 0.8), (1.0, 1.0), (0.9, 0.0)]),
    st.integers(0, 999),
)
def test_advantages_of_unequal_windows_of_training_equal_brute_force(responses, deferred, bootstrap, discounts, seed):
    """Every response's window of training is as long as its deferred windows make it; the edge is its last token alone."""
    step, (gamma, lam) = 3, discounts
    rng = np.random.default_rng(seed)
    algorithm = AlgorithmConfig(**{**RAW.__dict__, "gamma": gamma, "lambda_value": lam, "bootstrap": bootstrap})
    rows, expected, values = [], [], []
    final = rng.normal(size=len(responses)).round(3)
    first = max((earlier + 1 for earlier in range(step) if earlier not in deferred), default=0)
    for id, windows in enumerate(responses):
        is_over, reward, grown = len(windows) <= step + 1, float(id % 2), windows[: step + 1]
        born, score = step + 1 - len(grown), Score(reward) if is_over else None
        rows.append(trajectory(grown, stopped=is_over, score=score, id=id, deferred=deferred, first_step=born))
        num_tokens = sum(n for k, n in enumerate(grown) if born + k >= first)
        of_window = rng.normal(size=num_tokens).round(3).tolist()
        values += of_window
        edge = 0.0 if is_over else final[id] if bootstrap is Bootstrap.critic else of_window[-1]
        expected += brute_force([0.0] * (num_tokens - 1) + [reward * is_over], of_window, gamma, lam, edge)
    batch, found = advantages(rows, step, values, algorithm, final=final.tolist())
    assert int(found.mask.sum()) == len(expected) and torch.equal(found.mask, batch.fields["mask"])
    np.testing.assert_allclose(found.raw.double().numpy(), expected, atol=2e-5)


def test_a_window_as_long_as_the_response_gives_plain_gae():
    values, rewards = [0.1, 0.3, 0.2, 0.6, 0.5], [0.0, 0, 0, 0, 1]
    response = trajectory([5], stopped=True, score=Score(1.0))
    batch, found = advantages([response], 0, values)
    plain = algorithms.gae(torch.tensor(rewards), torch.tensor(values), torch.tensor([0, 5]), gamma=1.0, lam=0.95)
    assert torch.equal(found.advantages[batch.fields["mask"]], plain)


def test_the_advantage_at_a_window_edge_is_zero_before_normalisation():
    _, found = advantages([trajectory([4], stopped=False)], 0, [0.2, 0.9, 0.1, 0.7])
    assert float(found.raw[-1]) == 0.0


def test_advantages_of_a_window_ignore_earlier_windows():
    now = trajectory([4, 3], stopped=True, score=Score(1.0))
    before = trajectory([4, 3], stopped=True, score=Score(1.0))
    before.old_values = [np.array([9.0] * 4, np.float32)]
    one, two = (advantages([t], 1, [0.2, 0.4, 0.5])[1].advantages for t in (now, before))
    assert torch.equal(one, two)


def test_responses_that_train_at_their_end_have_the_advantages_of_one_pass():
    """schedule.training_window_tokens=0: over all windows at once, whatever step generated them."""
    values = [0.2, 0.4, 0.5, 0.6, 0.55, 0.7, 0.8]
    whole = trajectory([4, 3], stopped=True, score=Score(1.0), prompt_tokens=2, first_step=5, deferred=[5])
    other = trajectory([2], stopped=True, score=Score(0.0), prompt_tokens=1, first_step=6, id=1)
    batch, found = advantages([whole, other], 6, [*values, 0.3, 0.1])
    assert found.mask.tolist() == [False] * 2 + [True] * 7 + [False] + [True] * 2 and found.ended.all()
    rewards, cu = torch.tensor([0.0] * 6 + [1, 0, 0]), torch.tensor([0, 7, 9])
    plain = algorithms.gae(rewards, torch.tensor([*values, 0.3, 0.1]), cu, gamma=1.0, lam=0.95)
    assert torch.equal(found.raw, plain)
    assert batch.fields["rollout_logprobs"][found.mask].tolist() == [-0.5] * 9
    kept = torch.zeros(len(batch.tokens))
    kept[batch.fields["mask"]] = torch.tensor([*values, 0.3, 0.1])
    store_model_outputs([whole, other], batch, ModelOutputs(kept, torch.zeros(2)), 6)
    assert np.concatenate(whole.old_values).tolist() == pytest.approx(values)
    assert np.concatenate(other.old_values).tolist() == pytest.approx([0.3, 0.1])
    assert response_batch([whole, other], RAW).fields["mask"].tolist() == found.mask.tolist()


DEFERRED = st.frozensets(st.integers(0, 3))
"""Steps in which no unfinished response trains."""


@given(DEFERRED, st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=6))
def test_every_generated_token_trains_the_policy_in_exactly_one_step(deferred, responses):
    """In the step that generated it or, of a deferred step, in the first later one that trains its response."""
    trained = [[0] * sum(windows) for windows in responses]
    for step in range(4):
        alive = [(id, windows) for id, windows in enumerate(responses) if len(windows) > step]
        rows = []
        for id, windows in alive:
            ended = len(windows) == step + 1
            score = Score(1.0) if ended else None
            rows.append(trajectory(windows[: step + 1], stopped=ended, score=score, id=id, deferred=deferred))
        rows = [t for t in rows if t.finished or step not in deferred]
        num_tokens = sum(t.training_tokens(step) for t in rows)
        batch, found = advantages(rows, step, [0.5] * num_tokens, final=[0.0] * len(rows))
        assert int(found.mask.sum()) == num_tokens
        for t, mask in zip(rows, found.mask.split(batch.lengths.tolist()), strict=True):
            for place in mask[3:].nonzero()[:, 0].tolist():
                trained[t.id][place] += 1
    assert all(count == 1 for counts in trained for count in counts)


def critic_windows(trajectories, step, window_values, algorithm=RAW, final=None, token_rewards=None):
    batch = window_batch(trajectories, step)
    values = torch.zeros(len(batch.tokens))
    values[batch.fields["mask"]] = torch.tensor(window_values)
    signals = ModelOutputs(values, torch.zeros(len(trajectories)) if final is None else torch.tensor(final), token_rewards)
    return window_critic_batch(trajectories, batch, signals, step=step, algorithm=algorithm)


def test_a_critic_that_learns_from_windows_has_the_values_own_targets():
    """V + A^lambda_critic over this step's tokens: Monte-Carlo where the response ends, the last value where it goes on."""
    ends = trajectory([4, 3], stopped=True, score=Score(1.0))
    goes_on = trajectory([4], stopped=False, first_step=1, id=1)
    values = [0.5, 0.4, 0.7, 0.2, 0.4, 0.5, 0.6]
    found = critic_windows([ends, goes_on], 1, values)
    assert found.fields["mask"].tolist() == [False] * 7 + [True] * 3 + [False] * 3 + [True] * 4
    on = found.fields["mask"]
    assert found.fields["returns"][on].tolist() == pytest.approx([1.0] * 3 + [0.6] * 4)
    assert found.fields["old_values"][on].tolist() == pytest.approx(values)
    low = AlgorithmConfig(**{**RAW.__dict__, "lambda_critic": 0.9, "bootstrap": Bootstrap.critic})
    cu, is_over = torch.tensor([0, 3, 7]), torch.tensor([True, False])
    rewards = torch.tensor([0.0, 0, 1, 0, 0, 0, 0])
    expected = algorithms.egae(
        rewards, torch.tensor(values), cu, is_over, gamma=1.0, lam=0.9, bootstrap=torch.tensor([0.0, 0.9])
    )
    found = critic_windows([ends, goes_on], 1, values, low, final=[0.0, 0.9])
    torch.testing.assert_close(found.fields["returns"][on], expected + torch.tensor(values))


def test_windows_and_responses_teach_the_critic_the_same_where_one_window_holds_the_response():
    pair = [trajectory([n], stopped=True, score=Score(r), id=n) for n, r in ((3, 1.0), (2, 0.0))]
    values = [0.1, 0.5, 0.3, 0.2, 0.6]
    for response, own in zip(pair, (values[:3], values[3:]), strict=True):
        response.old_values = [np.array(own, np.float32)]
    one, two = critic_windows(pair, 0, values), response_batch(pair, RAW)
    assert torch.equal(one.joined().tokens, two.joined().tokens) and one.fields.keys() == two.fields.keys()
    for name in one.fields:
        torch.testing.assert_close(one.fields[name], two.fields[name])


def test_window_critic_batch_excludes_unscored_responses():
    lost = trajectory([2], stopped=True, score=Score(None, error="died"))
    goes_on = trajectory([2], stopped=False, id=1)
    found = critic_windows([lost, goes_on], 0, [0.5, 0.5, 0.1, 0.2], token_rewards=torch.tensor([0.0] * 8 + [-1.0, -2.0]))
    assert found.fields["mask"].tolist() == [False] * 8 + [True] * 2
    assert found.fields["returns"][-2:].tolist() == pytest.approx([0.2 - 3, 0.2 - 2])
    assert critic_windows([lost], 0, [0.5, 0.5]) is None
    cut = trajectory([4], stopped=False, score=Score(0.0), budget=4)
    filtered = AlgorithmConfig(**{**RAW.__dict__, "overlong": Overlong.filter})
    assert critic_windows([cut], 0, [0.5] * 4, filtered) is None


def test_a_step_in_which_nothing_ended_has_nothing_to_train_on():
    batch, found = advantages([], 0, [])
    assert batch.num_sequences == 0 and len(found.mask) == 0
    trained, metrics = policy_batch([], batch, torch.zeros(0), found, RAW)
    assert trained.num_sequences == 0 and not any(math.isnan(value) for value in metrics.values())
    assert response_batch([], RAW) is None
    assert advantage_metrics(batch, found) == {"advantage/finished_tokens": 0, "advantage/unfinished_tokens": 0}


def test_prompt_tokens_and_earlier_windows_train_nothing():
    batch, found = advantages([trajectory([4, 3], stopped=True, score=Score(1.0), prompt_tokens=5)], 1, [0.1, 0.2, 0.3])
    assert found.mask.tolist() == [False] * 9 + [True] * 3
    assert batch.fields["mask"].tolist() == found.mask.tolist()


def test_a_reward_reaches_only_the_window_in_which_the_response_ended():
    unfinished = trajectory([4], stopped=False, score=None)
    _batch, found = advantages([unfinished], 0, [0.5] * 4)
    assert torch.count_nonzero(found.raw) == 0
    _, found = advantages([trajectory([2], stopped=True, score=Score(1.0))], 0, [0.5] * 2)
    assert found.raw[-2:].tolist() == pytest.approx([0.475, 0.5])


def test_immediate_advantages_train_every_window_on_its_tokens_own_rewards():
    config = Config(algorithm=replace(RAW, advantage="immediate", outcome_coef=0.0))
    assert facts_of(config).windows and not facts_of(config).whole_groups
    pair = [trajectory([4, 2], stopped=False, id=0), trajectory([2, 3], stopped=True, score=Score(1.0), id=1)]
    batch = window_batch(pair, 1)
    token_rewards = torch.arange(len(batch.tokens), dtype=torch.float32)
    signals = ModelOutputs(token_rewards=token_rewards)
    found = window_advantages(pair, batch, signals, step=1, window_tokens=WINDOW, algorithm=config.algorithm)
    assert int(found.mask.sum()) == 5
    assert torch.equal(found.advantages, torch.where(found.mask, token_rewards, 0.0))


def test_a_response_cut_at_the_whole_budget_counts_as_finished_and_is_scored():
    cut = trajectory([4], stopped=False, score=Score(0.0), budget=4)
    _, found = advantages([cut], 0, [0.5] * 4)
    assert float(found.raw[-1]) == -0.5
    assert response_batch([cut_with_values(cut, [0.5] * 4)], RAW).fields["returns"][-4:].tolist() == [0.0] * 4


def cut_with_values(response, values):
    response.old_values = [np.array(values, np.float32)]
    return response


def test_boundary_tokens_of_unfinished_windows_are_left_out_and_do_not_move_the_statistics():
    algorithm = AlgorithmConfig(
        lambda_policy=LambdaKind.constant,
        ignore_boundary_tokens=2,
        normalization=Normalization.scale,
        advantage_clamp=0.0,
    )
    pair = [trajectory([4], stopped=False), trajectory([4], stopped=True, score=Score(1.0), id=1)]
    batch, one = advantages(pair, 0, [0.2, 0.4, 0.5, 0.6, 0.1, 0.2, 0.3, 0.4], algorithm)
    assert one.mask.tolist() == [False] * 3 + [True, True, False, False] + [False] * 3 + [True] * 4
    counted = one.raw[one.mask[batch.fields["mask"]]]
    torch.testing.assert_close(one.advantages[one.mask], counted / counted.std(correction=0), rtol=1e-4, atol=1e-6)


def test_a_response_that_could_not_be_scored_trains_nothing():
    lost = trajectory([4], stopped=True, score=Score(None, error="grader died"))
    _, found = advantages([lost, trajectory([2], stopped=True, score=Score(1.0))], 0, [0.5] * 6)
    assert not found.mask[:7].any() and found.mask[-2:].all()


def test_the_critics_own_value_can_stand_at_the_edge():
    algorithm = AlgorithmConfig(**{**RAW.__dict__, "bootstrap": Bootstrap.critic})
    _, found = advantages([trajectory([1], stopped=False)], 0, [0.25], algorithm, final=[1.0])
    assert float(found.raw[-1]) == 0.75


def test_length_adaptive_lambda_counts_all_windows_and_half_a_window_more_while_unfinished():
    algorithm = AlgorithmConfig(**{**RAW.__dict__, "lambda_policy": LambdaKind.length_adaptive, "lambda_value": 0.0})
    response = trajectory([4] * 10, stopped=False)
    _, found = advantages([response], 9, [0.0, 1.0, 1.0, 2.0], algorithm)
    lam = 1 - 1 / (0.05 * (40 + WINDOW // 2))
    assert float(found.raw[-3]) == pytest.approx(lam * 1.0) and float(found.raw[-4]) == pytest.approx(1 + lam**2)


def test_the_critic_sees_a_finished_response_once_over_all_windows_with_monte_carlo_targets():
    response = cut_with_values(trajectory([4, 4, 1], stopped=True, score=Score(0.75)), [0.1] * 9)
    batch = response_batch([response], RAW)
    assert batch.fields["mask"].tolist() == [False] * 3 + [True] * 9
    assert batch.fields["returns"].tolist() == [0.0] * 3 + [0.75] * 9
    assert batch.fields["old_values"][3:].tolist() == pytest.approx([0.1] * 9)


def test_values_are_remembered_from_the_step_that_generated_the_token():
    response = trajectory([4, 2], stopped=True)
    for step, new in ((0, [0.1, 0.2, 0.3, 0.4]), (1, [0.5, 0.6])):
        shown = trajectory([4, 2][: step + 1], stopped=False)
        shown.old_values = response.old_values
        batch = window_batch([shown], step)
        values = torch.zeros(len(batch.tokens))
        values[batch.fields["mask"]] = torch.tensor(new)
        store_model_outputs([shown], batch, ModelOutputs(values), step)
    assert np.concatenate(response.old_values).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 14), min_size=1, max_size=5), st.integers(0, 3))
def test_over_all_steps_the_policy_trains_every_token_once_but_for_the_ignored_ones(lengths, n_ignore):
    algorithm = AlgorithmConfig(**{**RAW.__dict__, "ignore_boundary_tokens": n_ignore})
    trained = [[0] * n for n in lengths]
    num_windows = [math.ceil(n / WINDOW) for n in lengths]
    for step in range(max(num_windows)):
        in_progress = [i for i, count in enumerate(num_windows) if step < count]
        shown = [
            trajectory(
                [min(WINDOW, lengths[i] - k * WINDOW) for k in range(step + 1)],
                stopped=step == num_windows[i] - 1,
                score=Score(1.0) if step == num_windows[i] - 1 else None,
            )
            for i in in_progress
        ]
        batch, found = advantages(shown, step, [0.5] * sum(t.window_tokens(step) for t in shown), algorithm)
        for i, t, start in zip(in_progress, shown, batch.cu_seqlens.tolist()):
            for position in range(t.num_response_tokens):
                trained[i][position] += int(found.mask[start + 3 + position])
    for i, counts in enumerate(trained):
        for position, count in enumerate(counts):
            in_last_window = position // WINDOW == num_windows[i] - 1
            ignored = not in_last_window and position % WINDOW >= WINDOW - n_ignore
            assert count == (0 if ignored else 1)


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_with_one_lambda_for_both_the_critics_targets_are_the_textbooks(lam):
    """R_t = A_t + V(s_t) with the policy's own advantages (ordinary PPO, arXiv 1707.06347), whatever the windows were."""
    values, reward = [0.2, 0.4, 0.5, 0.6, 0.1], 0.75
    algorithm = AlgorithmConfig(**{**RAW.__dict__, "lambda_value": lam, "lambda_critic": lam, "gamma": 0.9})
    for windows in ([5], [2, 2, 1]):
        response = cut_with_values(trajectory(windows, stopped=True, score=Score(reward)), values)
        found = response_batch([response], algorithm).fields["returns"][3:]
        expected = []
        for t in range(5):
            deltas = [(0.9 * values[k + 1] if k < 4 else reward) - values[k] for k in range(t, 5)]
            expected.append(values[t] + sum((0.9 * lam) ** i * delta for i, delta in enumerate(deltas)))
        torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=0)
    whole = cut_with_values(trajectory([5], stopped=True, score=Score(reward)), values)
    _, policy = advantages([whole], 0, values, algorithm)
    torch.testing.assert_close(policy.raw, torch.tensor(expected) - torch.tensor(values), atol=1e-6, rtol=0)


def test_the_critics_targets_are_cut_at_the_turns_for_any_lambda():
    talk = dialogue([2, 1], rewards=[0.25, 1.0])
    talk.old_values = [np.array([0.5, 0.0, 0.25], np.float32)]
    found = response_batch([talk], AlgorithmConfig(**{**RAW.__dict__, "lambda_critic": 0.5}), INDEPENDENT)
    assert found.fields["returns"].tolist() == pytest.approx([0, 0, 0, 0.5 * 0.25 + 0.5 * 0.0, 0.25, 0, 0, 1.0])


def test_an_old_policy_that_is_the_engines_leaves_no_mismatch_to_report():
    algorithm = AlgorithmConfig(**{**RAW.__dict__, "correction": CorrectionConfig(old_policy=OldPolicy.rollout)})
    response = trajectory([3], stopped=True, score=Score(1.0))
    for chosen, is_compared in ((algorithm, False), (RAW, True)):
        batch, found = advantages([response], 0, [0.0] * 3, chosen)
        trained, metrics = policy_batch([response], batch, batch.fields["rollout_logprobs"], found, chosen)
        assert bool(metrics) is is_compared and int(trained.fields["mask"].sum()) == 3


def test_lambda_of_a_long_response_is_exact():
    """1 - 1 / (0.05 l) in float32 is off by 5e-4 of the signal after 24,576 tokens."""
    algorithm = AlgorithmConfig(**{**RAW.__dict__, "lambda_policy": LambdaKind.length_adaptive})
    length = 24576
    response = trajectory([length], stopped=True, score=Score(1.0), budget=length)
    _, found = advantages([response], 0, [0.0] * length, algorithm)
    assert float(found.raw[0]) == pytest.approx((1 - 1 / (0.05 * length)) ** (length - 1), rel=1e-6)


def test_metrics_are_split_by_finished_and_unfinished_and_rewards_are_of_finished_ones():
    group = [trajectory([4], stopped=False), trajectory([2], stopped=True, score=Score(1.0), id=1)]
    batch, found = advantages(group, 0, [0.2, 0.4, 0.5, 0.6, 0.5, 0.5])
    metrics = advantage_metrics(batch, found)
    assert (metrics["advantage/finished_tokens"], metrics["advantage/unfinished_tokens"]) == (2, 4)
    assert metrics["advantage/finished_mean"] == pytest.approx((0.475 + 0.5) / 2)
    expected = {"reward/num_unscored": 0, "reward/error_rate": 0, "reward/mean": 1, "reward/accuracy": 1}
    assert reward_metrics([group[1]]) == expected
    judged = trajectory([2], stopped=True, score=Score(0.7))
    assert reward_metrics([judged]) == {"reward/num_unscored": 0, "reward/error_rate": 0, "reward/mean": 0.7}
    assert rollout_metrics(group, step=0)["rollout/finished_share"] == 0.5


def dialogue(turns, *, step=0, done=True, rewards=(), id=0):
    """Turn k has turns[k] tokens of its own role, all generated in ``step``; two tokens of a message stand between."""
    segments = []
    for index, count in enumerate(turns):
        if index:
            segments.append(message_segment((8, 8), weight_version=0, step=step, turn=index - 1))
        role = ("policy", "verifier")[index % 2]
        segments.append(Segment((7,) * count, (-0.5,) * count, 0, "stop", step, index, role))
    return Trajectory(
        id,
        Prompt(id="p", token_ids=(1, 1, 1)),
        0,
        0,
        100,
        segments,
        dialogue=True,
        env_done=done,
        score=Score(1.0) if done else None,
        turn_scores={index: Score(value) for index, value in enumerate(rewards)},
    )


INDEPENDENT = ResponseRules(independent_turns=True)


def test_messages_of_the_environment_train_nothing():
    talk = dialogue([3, 2], rewards=[1.0, 0.0])
    _batch, found = advantages([talk], 0, [0.5] * 5, rules=INDEPENDENT)
    assert found.mask.tolist() == [False] * 3 + [True] * 3 + [False] * 2 + [True] * 2
    talk.old_values = [np.array([0.5] * 5, np.float32)]
    assert response_batch([talk], RAW, INDEPENDENT).fields["mask"].tolist() == found.mask.tolist()


def test_each_independent_turn_is_an_episode():
    """Perturbing the reward of turn k + 1 leaves the advantages of turns up to k as they were (PAG, arXiv 2506.10406)."""
    values = [0.1, 0.4, 0.2, 0.6, 0.3, 0.5]
    one, two = (
        advantages([dialogue([3, 2, 1], rewards=[0.0, 1.0, last])], 0, values, rules=INDEPENDENT)[1].raw
        for last in (0, 1)
    )
    assert torch.equal(one[:-1], two[:-1]) and one[-1] != two[-1]
    alone = algorithms.gae(
        torch.tensor([0.0, 1.0]), torch.tensor([0.6, 0.3]), torch.tensor([0, 2]), gamma=1.0, lam=0.95
    )
    torch.testing.assert_close(one[3:5], alone)


def test_the_critics_targets_are_cut_at_the_turns():
    talk = dialogue([2, 1], rewards=[0.25, 1.0])
    talk.old_values = [np.array([0.0] * 3, np.float32)]
    assert response_batch([talk], RAW, INDEPENDENT).fields["returns"].tolist() == [0, 0, 0, 0.25, 0.25, 0, 0, 1.0]


def test_a_continuous_dialogue_is_one_episode_over_its_own_tokens():
    talk = dialogue([2, 2])
    values = [0.2, 0.4, 0.5, 0.6]
    _, found = advantages([talk], 0, values)
    plain = algorithms.gae(
        torch.tensor([0, 0, 0, 1.0]), torch.tensor(values), torch.tensor([0, 4]), gamma=1.0, lam=0.95
    )
    torch.testing.assert_close(found.raw, plain)


def test_a_turn_that_could_not_be_scored_trains_nothing_and_its_neighbours_do():
    talk = dialogue([2, 2])
    talk.turn_scores = {0: Score(1.0), 1: Score(None, error="died")}
    _, found = advantages([talk], 0, [0.5] * 4, rules=INDEPENDENT)
    assert found.mask.tolist() == [False] * 3 + [True] * 2 + [False] * 4
    talk.old_values = [np.array([0.5] * 4, np.float32)]
    assert response_batch([talk], RAW, INDEPENDENT).fields["mask"].tolist() == found.mask.tolist()


def test_roles_are_normalised_apart():
    algorithm = AlgorithmConfig(**{**RAW.__dict__, "normalize_by_role": True})
    talks = [dialogue([2, 2], rewards=[r, 100 * v], id=i) for i, (r, v) in enumerate([(0, 1), (1, 0), (1, 1)])]
    _batch, found = advantages(talks, 0, [0.1, 0.3, 0.2, 0.4] * 3, algorithm, rules=INDEPENDENT)
    by_turn = found.advantages[found.mask].view(3, 2, 2)
    for role in range(2):
        assert float(by_turn[:, role].mean()) == pytest.approx(0, abs=1e-6)
        assert float(by_turn[:, role].std(correction=0)) == pytest.approx(1, abs=1e-5)


def test_hot_tokens_are_context_for_the_policy_loss_and_ordinary_states_for_the_critic():
    hot = Segment((9,), (-3.0,), 0, "length", 0, hot=True)
    response = Trajectory(0, Prompt("p", (1,)), 0, 0, 9, [hot, Segment((7, 7), (-0.5,) * 2, 0, "stop", 0)])
    response.score, response.old_values = Score(1.0), [np.zeros(3, np.float32)]
    _, masked = advantages([response], 0, [0.0] * 3, rules=ResponseRules(masks_hot_tokens=True))
    _, kept = advantages([response], 0, [0.0] * 3)
    assert masked.mask.tolist() == [False, False, True, True] and kept.mask.tolist() == [False, True, True, True]
    assert torch.equal(masked.raw, kept.raw)
    assert response_batch([response], RAW).fields["mask"].tolist() == [False, True, True, True]


def test_the_soft_penalty_counts_whole_responses_and_never_a_window():
    algorithm = AlgorithmConfig(**{**RAW.__dict__, "overlong": Overlong.soft, "overlong_buffer_tokens": 4})
    cut = cut_with_values(trajectory([8], stopped=False, score=Score(1.0), budget=8), [0.0] * 8)
    assert response_batch([cut], algorithm).fields["returns"][-1] == 0.0  # 1 - 1
    near = cut_with_values(trajectory([6], stopped=True, score=Score(1.0), budget=8), [0.0] * 6)
    assert response_batch([near], algorithm).fields["returns"][-1] == 0.5
    _, found = advantages([trajectory([8], stopped=False, budget=100)], 0, [0.0] * 8, algorithm)
    assert not found.raw.any()


def test_overlong_filtering_takes_cut_responses_out_of_both_losses():
    algorithm = AlgorithmConfig(**{**RAW.__dict__, "overlong": Overlong.filter})
    cut = cut_with_values(trajectory([4], stopped=False, score=Score(0.0), budget=4), [0.0] * 4)
    whole = cut_with_values(trajectory([2], stopped=True, score=Score(1.0), budget=4), [0.0] * 2)
    _, found = advantages([cut, whole], 0, [0.0] * 6, algorithm)
    assert int(found.mask.sum()) == 2 and found.mask[-2:].all()
    assert response_batch([cut], algorithm) is None
    assert response_batch([cut, whole], algorithm).num_sequences == 1


def test_rewards_of_tokens_reach_the_advantages_and_later_the_critic():
    """A KL penalty or a line's reward of an early window is part of the Monte-Carlo target when the response ends."""
    response = trajectory([2], stopped=False)
    batch = window_batch([response], 0)
    signals = ModelOutputs(torch.zeros(5), torch.zeros(1), torch.tensor([0, 0, 0, -0.5, -0.25]))
    found = window_advantages([response], batch, signals, step=0, window_tokens=2, algorithm=RAW)
    assert found.raw[-2:].tolist() == pytest.approx([-0.5 + 0.95 * -0.25, -0.25])
    store_model_outputs([response], batch, signals, 0)
    whole = trajectory([2, 1], stopped=True, score=Score(1.0))
    whole.old_values, whole.token_rewards = [np.zeros(3, np.float32)], [*response.token_rewards, np.zeros(1, np.float32)]
    assert response_batch([whole], RAW).fields["returns"][3:].tolist() == pytest.approx([0.25, 0.75, 1.0])


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.floats(-2, 2)), min_size=1, max_size=8))
def test_advantages_without_a_critic_against_brute_force(responses):
    groups, sizes, outcomes = (list(column) for column in zip(*responses))
    cu = torch.tensor([0, *sizes]).cumsum(0)
    rewards = torch.zeros(sum(sizes))
    rewards[cu[1:] - 1] = torch.tensor(outcomes, dtype=torch.float32)
    scored = torch.ones(len(sizes), dtype=torch.bool)

    def others(i, with_self):
        return [o for j, (g, o) in enumerate(zip(groups, outcomes)) if g == groups[i] and (with_self or j != i)]

    for kind, expected in (
        ("group_mean", [o - sum(others(i, True)) / len(others(i, True)) for i, o in enumerate(outcomes)]),
        (
            "rloo",
            [
                o - sum(others(i, False)) / len(others(i, False)) if others(i, False) else 0
                for i, o in enumerate(outcomes)
            ],
        ),
    ):
        episodes = Episodes(rewards, cu, scored, scored, torch.tensor(groups), gamma=1.0, lam=1.0)
        found = estimate_advantages(kind, {}, episodes)
        per_token = [e for e, size in zip(expected, sizes) for _ in range(size)]
        assert found.tolist() == pytest.approx(per_token, abs=1e-5)


def test_a_run_without_a_critic_needs_no_values():
    algorithm = AlgorithmConfig(**{**RAW.__dict__, "advantage": "group_mean"})
    pair = [trajectory([2], stopped=True, score=Score(r), id=i) for i, r in enumerate((1.0, 0.0))]
    batch = window_batch(pair, 0)
    found = window_advantages(pair, batch, ModelOutputs(), step=0, window_tokens=4, algorithm=algorithm)
    assert found.advantages[found.mask].tolist() == [0.5, 0.5, -0.5, -0.5]


def test_staleness_counts_only_tokens_that_train():
    one, two = trajectory([2, 3], stopped=True, score=Score(1.0)), trajectory([4], stopped=False, id=1)
    trained = torch.tensor([False] * 3 + [True] * 5 + [False] * 3 + [True] * 4)
    assert staleness_metrics([one, two], trained, 5) == {
        "rollout/staleness_mean": pytest.approx((2 * 5 + 3 * 4 + 4 * 5) / 9), "rollout/staleness_max": 5.0
    }
    trained[8:] = False
    trained[3:5] = False  # the first window
    assert staleness_metrics([one, two], trained, 5) == {"rollout/staleness_mean": 4.0, "rollout/staleness_max": 4.0}
    assert staleness_metrics([one, two], torch.zeros_like(trained), 5) == {}
