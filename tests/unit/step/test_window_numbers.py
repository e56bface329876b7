"""A step's advantages and metrics equal loops in float64 over random dialogues; their cost is limited."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.algorithms import sequences
from megatron_rl.config.schema import AlgorithmConfig, Bootstrap, CorrectionConfig, LambdaKind, Normalization, Overlong
from megatron_rl.data.trajectory import Prompt, Score, Segment, Trajectory, message_segment
from megatron_rl.step.loss_batches import policy_batch, response_batch, store_model_outputs
from megatron_rl.step.metrics import advantage_metrics, critic_metrics
from megatron_rl.step.packing import window_batch
from megatron_rl.step.window_advantages import ModelOutputs, ResponseRules, window_advantages

STEP = 2


@st.composite
def dialogues(draw):
    """Responses over up to three windows, with messages between their turns; some have no token in the last window."""
    found = []
    for row in range(draw(st.integers(0, 5))):
        segments = []
        for step in range(draw(st.integers(0, 2)), STEP + 1):
            for number in draw(st.lists(st.integers(0, 6), max_size=2)):
                turn = len(segments) // 2
                segments.append(Segment([7] * number, [-0.5] * number, step, "length", step, turn, hot=draw(st.booleans())))
                if draw(st.booleans()):
                    segments.append(message_segment([8] * draw(st.integers(1, 3)), weight_version=0, step=step, turn=turn))
        one = Trajectory(row, Prompt("p", (1,) * draw(st.integers(1, 3))), row // 2, 0, 1000, segments, dialogue=True)
        grew = any(len(s.token_ids) for s in segments if s.generated and s.step == STEP)
        one.env_done = grew and draw(st.booleans())
        one.out_of_room = grew and not one.env_done and draw(st.booleans())
        if one.finished:
            one.score = Score(draw(st.sampled_from([None, 0.0, 1.0, -0.5])))
        found.append(one)
    return found


def settings_of(overlong, bootstrap, n_ignore, normalization):
    return AlgorithmConfig(
        gamma=0.97, lambda_policy=LambdaKind.constant, lambda_value=0.9, overlong=overlong, bootstrap=bootstrap,
        ignore_boundary_tokens=n_ignore, normalization=normalization, advantage_clamp=2.0,
    )  # fmt: skip


def by_loops(responses, values, final_values, algorithm, rules):
    """(raw advantages, counts) of the window's tokens."""
    raw, counts, start = [], [], 0
    for row, response in enumerate(responses):
        hot = [s.hot for s in response.segments if s.generated and s.step == STEP for _ in s.token_ids]
        own, start = values[start : start + len(hot)].tolist(), start + len(hot)
        at_cut = float(final_values[row]) if algorithm.bootstrap is Bootstrap.critic else (own or [0.0])[-1]
        after, advantage, of_row = 0.0 if response.finished else at_cut, 0.0, []
        for place in reversed(range(len(own))):
            is_last = place == len(own) - 1
            reward = response.reward if is_last and response.finished and response.reward is not None else 0.0
            advantage = reward + algorithm.gamma * after - own[place] + algorithm.gamma * algorithm.lambda_value * advantage
            after = own[place]
            of_row.insert(0, advantage)
        raw += of_row
        is_taken = not response.finished or response.reward is not None
        is_taken &= not (algorithm.overlong is Overlong.filter and response.finished and not response.ended_naturally)
        ignored = 0 if response.finished else algorithm.ignore_boundary_tokens
        for place, is_hot in enumerate(hot):
            counts.append(is_taken and place < len(own) - ignored and not (is_hot and rules.masks_hot_tokens))
    return np.array(raw), np.array(counts, bool)


@settings(max_examples=60, deadline=None)
@given(
    dialogues(), st.sampled_from(list(Overlong)), st.sampled_from(list(Bootstrap)), st.integers(0, 3),
    st.sampled_from(list(Normalization)), st.booleans(), st.integers(0, 2**31), st.sampled_from([3, 32_000]),
)  # fmt: skip
def test_window_advantages_equal_loops_in_float64(responses, overlong, bootstrap, n_ignore, normalization, hot, seed, block):
    overlong = Overlong.none if overlong is Overlong.soft else overlong
    algorithm, rules = settings_of(overlong, bootstrap, n_ignore, normalization), ResponseRules(masks_hot_tokens=hot)
    generator, batch = torch.Generator().manual_seed(seed), window_batch(responses, STEP)
    in_window = batch.fields["mask"]
    signals = ModelOutputs(torch.randn(len(in_window), generator=generator), torch.randn(len(responses), generator=generator))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences, "BLOCK_TOKENS", block)
        found = window_advantages(responses, batch, signals, step=STEP, window_tokens=6, algorithm=algorithm, rules=rules)
        metrics = advantage_metrics(batch, found)
    values = signals.values[in_window].double()
    raw, counts = by_loops(responses, values, signals.final_values.double(), algorithm, rules)
    assert found.mask[in_window].tolist() == counts.tolist() and not found.mask[~in_window].any()
    np.testing.assert_allclose(found.raw.numpy(), raw, atol=1e-5)

    mean, deviation = (raw[counts].mean(), raw[counts].std()) if counts.any() else (0.0, 0.0)
    scale = deviation if normalization is not Normalization.none and deviation > 1e-6 else 1.0
    centre = mean if normalization is Normalization.whiten else 0.0
    expected = np.where(counts, np.clip((raw - centre) / scale, -2.0, 2.0), 0.0)
    np.testing.assert_allclose(found.advantages[in_window].numpy(), expected, atol=1e-4)
    assert not found.advantages[~in_window].any()

    ended = np.array([t.finished for t in responses for _ in range(t.window_tokens(STEP))], bool)
    for name, group in (("finished", counts & ended), ("unfinished", counts & ~ended)):
        assert metrics[f"advantage/{name}_tokens"] == group.sum()
        if group.any():
            assert metrics[f"advantage/{name}_mean"] == pytest.approx(raw[group].mean(), abs=1e-5)
            assert metrics[f"advantage/{name}_std"] == pytest.approx(raw[group].std(), abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(dialogues(), st.integers(0, 2**31), st.sampled_from([3, 32_000]))
def test_critic_metrics_equal_loops_in_float64(responses, seed, block):
    generator, finished = torch.Generator().manual_seed(seed), [t for t in responses if t.finished]
    for response in finished:
        response.old_values = [torch.randn(response.num_generated_tokens, generator=generator).numpy()]
    batch = response_batch(finished, AlgorithmConfig(gamma=0.9))
    if batch is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences, "BLOCK_TOKENS", block)
        metrics = critic_metrics(batch)
    quarters, pairs = [[] for _ in range(4)], []
    for response in (t for t in finished if t.reward is not None):
        number = response.num_generated_tokens
        for place, value in enumerate(response.old_values[0].tolist()):
            target = response.reward * 0.9 ** (number - 1 - place)
            pairs.append((value, target))
            quarters[place * 4 // number].append(target - value)
    values, returns = np.array(pairs).T
    assert metrics["critic/value_mean"] == pytest.approx(values.mean(), abs=1e-5)
    assert metrics["critic/return_mean"] == pytest.approx(returns.mean(), abs=1e-5)
    if returns.var() > 1e-6:
        explained = 1 - (returns - values).var() / returns.var()
        assert metrics["critic/explained_variance"] == pytest.approx(explained, rel=1e-3, abs=1e-3)
    for index, quarter in enumerate(quarters):
        assert (f"critic/advantage_q{index + 1}" in metrics) == bool(quarter)
        if quarter:
            assert metrics[f"critic/advantage_q{index + 1}"] == pytest.approx(np.mean(quarter), abs=1e-5)


class WholePasses(TorchDispatchMode):
    """Counts what torch makes that has a number for each of so many tokens."""

    def __init__(self, num_tokens):
        super().__init__()
        self.num_tokens, self.made = num_tokens, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.numel() >= self.num_tokens and not func.is_view:
            self.made.append(str(func))
        return found


def a_step(num_sequences, length):
    """The numbers of one step: a finished response and one that goes on, in turn."""
    responses = []
    for row in range(num_sequences):
        reason = "stop" if row % 2 else "length"
        segment = Segment(np.full(length, 7), np.full(length, -0.5), 1, reason, STEP)
        score = Score(float(row % 4 == 1)) if row % 2 else None
        responses.append(Trajectory(row, Prompt("p", (1,) * 9), row // 2, 0, 10 * length, [segment], score=score))
    batch = window_batch(responses, STEP)
    random = torch.Generator().manual_seed(0)
    old = batch.fields["rollout_logprobs"] + 0.01 * torch.rand(len(batch.tokens), generator=random)
    signals = ModelOutputs(torch.rand(len(batch.tokens), generator=random), torch.rand(num_sequences, generator=random))

    def numbers():
        algorithm = AlgorithmConfig(correction=CorrectionConfig(weight="token"))
        found = window_advantages(responses, batch, signals, step=STEP, window_tokens=length, algorithm=algorithm)
        store_model_outputs(responses, batch, signals, STEP)
        policy_batch(responses, batch, old, found, algorithm)
        advantage_metrics(batch, found)
        critic_metrics(response_batch(responses[1::2], algorithm))

    return numbers


def test_a_steps_numbers_are_made_in_blocks():
    """Few of torch's operations make something as long as the step: each would be new memory of gigabytes."""
    num_sequences, length = 12, 9000
    numbers = a_step(num_sequences, length)
    with WholePasses(num_sequences * length // 2) as passes:
        numbers()
    assert len(passes.made) <= 8, passes.made


def test_metrics_of_a_step_start_no_torch_threads():
    """Waking them for each block would take ten times the CPU seconds of its numbers."""
    code = (
        "from tests.unit.step.test_window_numbers import a_step\n"
        "threads = lambda: int(open('/proc/self/status').read().split('Threads:')[1].split()[0])\n"
        "a_step(3, 9)(); numbers = a_step(3, 9000); before = threads(); numbers(); print(before, threads())"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300, env=environment)
    before, after = map(int, found.stdout.split())
    assert before == after, "an operation of a block is shared among threads"
