"""The KL penalty in rewards and loss, and the steps in which its coefficient adapts."""

import numpy as np
import pytest
import torch

from megatron_rl.config.schema import AlgorithmConfig, Config, KlConfig, KlPlace, ReferenceConfig
from megatron_rl.data.batch import TEACHER_IDS, TEACHER_LOGPROBS
from megatron_rl.data.trajectory import Prompt, Segment, Trajectory
from megatron_rl.rollout.served_reference import Scores
from megatron_rl.step.kl_penalty import KlPenalty
from megatron_rl.step.packing import window_batch
from megatron_rl.step.stages import reference_logprobs
from megatron_rl.step.state import StepState

OURS, THEIRS = torch.tensor([0.0, -1.0, -2.0, 0.0, -1.0]), torch.tensor([0.0, -1.5, -1.0, 0.0, -2.0])


def state_of(line_rewards=None):
    """Two responses, of two tokens and of one, behind prompts of one token; types math and chat."""
    group = [
        Trajectory(i, Prompt(str(i), (1,), type=kind), i, 0, 9, [Segment((5,) * n, (-1.0,) * n, 0, "stop", 0)])
        for i, (kind, n) in enumerate((("math", 2), ("chat", 1)))
    ]
    state = StepState(group, window_batch(group, 0), line_rewards=line_rewards)
    state.old_logprobs, state.reference_logprobs = OURS, THEIRS
    return state


def test_without_a_penalty_nothing_is_charged_and_no_reference_is_read():
    lines = torch.arange(5.0)
    state = state_of(lines)
    del state.reference_logprobs
    token_rewards, loss_fields, metrics = KlPenalty(KlConfig(place=KlPlace.none)).charge(state)
    assert token_rewards is lines and not loss_fields and not metrics


def test_in_the_rewards_every_token_pays_its_own_divergence_at_its_prompts_coefficient():
    settings = KlConfig(place=KlPlace.reward, estimator="k1", coef=0.1, coef_by_type={"chat": 0.5})
    for lines in (None, torch.arange(5.0)):
        token_rewards, loss_fields, _ = KlPenalty(settings).charge(state_of(lines))
        expected = (0.0 if lines is None else lines) - torch.tensor([0.0, 0.05, -0.1, 0.0, 0.5])
        torch.testing.assert_close(token_rewards, expected)
        assert not loss_fields


def test_in_the_loss_the_rewards_stay_and_the_loss_gets_its_fields():
    penalty = KlPenalty(KlConfig(place=KlPlace.loss, coef=0.1, coef_by_type={"chat": 0.5}))
    token_rewards, loss_fields, _ = penalty.charge(state_of())
    assert token_rewards is None and loss_fields["reference_logprobs"] is THEIRS
    torch.testing.assert_close(loss_fields["kl_coefs"], torch.tensor([0.1, 0.1, 0.1, 0.5, 0.5]))


def test_the_most_likely_tokens_of_each_prompt_types_own_teacher_reach_the_loss_at_their_tokens(monkeypatch):
    async def served(url, sequences, *, api_key, top_k):
        assert api_key == "secret" and top_k == 2
        first_id = {"http://teacher:1": 10, "http://chats:1": 30}[url]
        lengths = [len(ids) - first for ids, first in sequences]
        ids = [np.arange(first_id, first_id + 2 * n, dtype=np.int32).reshape(n, 2) for n in lengths]
        return [Scores(np.full(len(table), -0.5, np.float32), table, -table.astype(np.float32)) for table in ids]

    monkeypatch.setattr(reference_logprobs, "served_logprobs", served)
    monkeypatch.setenv("TEACHERS_KEY", "secret")
    kl = KlConfig(place=KlPlace.loss, coef=1.0, top_k=2)
    teachers = ReferenceConfig(path="http://teacher:1", path_by_type={"chat": "http://chats:1"}, api_key_env="TEACHERS_KEY")
    state = state_of()
    reference_logprobs.run(0, state, config=Config(algorithm=AlgorithmConfig(kl=kl), reference=teachers), group=None)
    assert state.reference_logprobs.tolist() == [0.0, -0.5, -0.5, 0.0, -0.5]
    _, fields, _ = KlPenalty(kl).charge(state)
    assert fields[TEACHER_IDS].tolist() == [[0, 0], [10, 11], [12, 13], [0, 0], [30, 31]] and fields[TEACHER_IDS].dtype is torch.int32
    assert torch.equal(fields[TEACHER_LOGPROBS], -fields[TEACHER_IDS].float())


def test_a_step_is_charged_with_the_coefficient_from_before_its_own_measurement():
    settings = KlConfig(place=KlPlace.reward, estimator="k1", coef=0.1, target=0.01, horizon=10)
    penalty = KlPenalty(settings)
    first, second = (penalty.charge(state_of())[2] for _ in range(2))
    assert first["kl/coef"] == 0.1 and second["kl/coef"] == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))
    assert first["kl/reference_per_response"] == pytest.approx((0.5 - 1.0 + 1.0) / 2)
    goes_on = KlPenalty(settings)
    goes_on.load_state(penalty.state())
    assert goes_on.charge(state_of())[2] == penalty.charge(state_of())[2]


def windows_of_kl(windows, *, type="math", id=0, finished=True, step=0):
    """A response whose last window is of ``step``; its earlier ones have been charged already."""
    segments = [
        Segment((5,) * n, (-1.0,) * n, 0, "stop" if finished and k == len(windows) - 1 else "length", k)
        for k, n in enumerate(windows)
    ]
    return Trajectory(id, Prompt("p", (1,), type=type), id, 0, 999, segments)


def charge(penalty, group, step, per_token):
    state = StepState(group, window_batch(group, step))
    state.old_logprobs = torch.zeros(len(state.batch.tokens))
    state.reference_logprobs = torch.full((len(state.batch.tokens),), -per_token)
    return penalty.charge(state)[2]


def test_the_adaptive_coefficient_sees_whole_responses_and_not_windows():
    """0.01 nats a token and 12 tokens in windows of 8 and 4: 0.12 nats, where the mean over slots and steps is 0.06."""
    penalty = KlPenalty(KlConfig(place=KlPlace.reward, estimator="k1", coef=1.0, target=0.1, horizon=100))
    response = windows_of_kl([8], finished=False)
    first = charge(penalty, [response], 0, 0.01)
    assert "kl/reference_per_response" not in first
    response = Trajectory.from_dict(response.to_dict())  # the checkpoint between the steps
    response.segments.append(Segment((5,) * 4, (-1.0,) * 4, 0, "stop", 1))
    second = charge(penalty, [response, windows_of_kl([0, 8], id=1, finished=False)], 1, 0.01)
    assert second["kl/reference_per_response"] == pytest.approx(0.12) and second["kl/coef"] == 1.0
    assert charge(penalty, [windows_of_kl([1])], 0, 0.0)["kl/coef"] == pytest.approx(1 + 0.2 / 100)


def test_prompts_with_a_coefficient_of_their_own_do_not_move_the_common_one():
    settings = KlConfig(place=KlPlace.loss, coef=1.0, coef_by_type={"free": 0.0}, target=1.0, horizon=100)
    alone = charge(KlPenalty(settings), [windows_of_kl([4])], 0, 0.25)
    together = charge(KlPenalty(settings), [windows_of_kl([4]), windows_of_kl([400], id=1, type="free")], 0, 0.25)
    assert together["kl/reference_per_response"] == alone["kl/reference_per_response"]
    by_type = KlConfig(place=KlPlace.loss, coef=0.0, coef_by_type={"math": 0.5})
    assert charge(KlPenalty(by_type), [windows_of_kl([4]), windows_of_kl([400], id=1, type="free")], 0, 0.25)[
        "kl/reference_per_response"
    ] == pytest.approx(4 * (2.718281828**-0.25 - 1 + 0.25), rel=1e-4)
