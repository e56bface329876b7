"""Laws of routing: decoding SGLang's records, replay, balance loss, load metrics, expert bias, settings."""

import base64
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from torch import Tensor

from megatron_rl.config.schema import Dispatcher, GroupedGemm, LoadBalancing, MoeConfig, ParallelConfig, RoutingReplay
from megatron_rl.data.trajectory import Prompt, Segment, Trajectory, message_segment
from megatron_rl.errors import ModelError
from megatron_rl.models.layers.moe import check_moe
from megatron_rl.models.layers.routing import (
    RoutingStats,
    _Choice,
    load_metrics,
    new_trace,
    normalized_scores,
    replay,
    sequence_balance_loss,
    updated_bias,
)
from megatron_rl.rollout.requests import GenerationRequest, RouteShape
from megatron_rl.rollout.sglang.wire.protocol import generate_body, parse_generation
from megatron_rl.rollout.sglang.wire.response_validation import InvalidReply, decode_routes
from megatron_rl.step.packing import window_routes
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops

SHAPE = RouteShape(num_layers=2, top_k=2, num_experts=4)


def encode(ids: list) -> str:
    return base64.b64encode(np.array(ids, dtype=np.int32).tobytes()).decode()


def test_decoded_routes_are_ids_plus_one_or_zero_for_duplicates():
    ids = [[[0, 3], [2, 1]], [[1, 0], [0, 0]], [[-1, 2], [3, 2]]]
    expected = [[[1, 4], [3, 2]], [[2, 1], [0, 0]], [[0, 0], [4, 3]]]
    routes = decode_routes(encode(ids), 3, SHAPE)
    assert routes.dtype == np.uint8 and routes.tolist() == expected


@pytest.mark.parametrize(
    "encoded,num_tokens,message",
    [
        (encode([[[0, 1], [0, 1]]]), 2, "2 tokens x 2 layers x 2, got 4"),
        (encode([[[0, 4], [0, 1]]]), 1, "ids below 4, got 0 to 4"),
        (encode([[[-7, 1], [0, 1]]]), 1, "ids below 4, got -7 to 1"),
        ("no base64!", 1, "not base64"),
        (base64.b64encode(b"abcde").decode(), 1, "not base64 of int32"),
    ],
)
def test_routes_impossible_for_the_model_are_rejected(encoded, num_tokens, message):
    with pytest.raises(InvalidReply, match=message):
        decode_routes(encoded, num_tokens, SHAPE)


def answer_with(**meta) -> dict:
    return {
        "output_ids": [7, 8],
        "meta_info": {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-0.1, 7, None], [-0.2, 8, None]],
            "weight_version": "1",
            **meta,
        },
    }


def test_request_returns_routes_when_asked():
    asking = GenerationRequest("a", (1, 2, 3), 2, routes=SHAPE)
    silent = GenerationRequest("b", (1, 2, 3), 2)
    assert generate_body([asking, silent], ["a", "b"])["return_routed_experts"] is True
    assert "return_routed_experts" not in generate_body([silent], ["b"])
    ids = np.arange(16).reshape(4, 2, 2) % 4
    found = parse_generation(asking, answer_with(routed_experts=encode(ids)))
    assert np.array_equal(found.routes, ids + 1)
    assert parse_generation(silent, answer_with()).routes is None


@pytest.mark.parametrize(
    "meta,message", [({}, "enable-return-routed-experts"), ({"routed_experts": "AAAA"}, "same model")]
)
def test_replies_without_usable_routes_are_rejected(meta, message):
    with pytest.raises(InvalidReply, match=message):
        parse_generation(GenerationRequest("a", (1, 2, 3), 2, routes=SHAPE), answer_with(**meta))


def trajectory_of(*segments: Segment) -> Trajectory:
    return Trajectory(0, Prompt("p", (1, 2, 3)), 0, 0, 100, list(segments))


def segment(num_tokens: int, step: int) -> Segment:
    return Segment((5,) * num_tokens, (-0.5,) * num_tokens, 1, "length", step)


def test_routes_of_a_window_align_with_their_tokens():
    grown = trajectory_of(segment(2, 0), segment(3, 1))
    grown.routes = 1, np.full((7, 2, 2), 3, dtype=np.int16)
    stale = trajectory_of(segment(2, 0))
    stale.routes = 0, np.full((4, 2, 2), 2, dtype=np.int16)
    answered = trajectory_of(segment(2, 1), message_segment((9, 9), weight_version=1, step=1, turn=0))
    answered.routes = 1, np.full((5, 2, 2), 4, dtype=np.int16)
    rows = window_routes([grown, stale, answered, trajectory_of()], 1)
    assert rows is not None
    routes = rows.packed(np.array([t.num_tokens for t in (grown, stale, answered, trajectory_of())]))
    expected = [3] * 7 + [0] + [0] * 5 + [4] * 5 + [0] * 2 + [0] * 3
    assert routes.shape == (len(expected), 2, 2) and routes.dtype == np.int16
    assert routes[:, 0, 0].tolist() == expected and (routes == routes[:, :1, :1]).all()
    assert window_routes([stale], 1) is None


def test_checkpoints_contain_no_routes():
    trajectory = trajectory_of(segment(2, 0))
    plain = trajectory.to_dict()
    trajectory.routes = 0, np.ones((4, 2, 2), dtype=np.int16)
    assert trajectory.to_dict() == plain and "routes" not in plain
    assert trajectory.routes is not None
    assert Trajectory.from_dict(plain).routes is None


@given(st.integers(1, 12), st.integers(2, 9), st.data())
def test_replay_depends_on_the_expert_set_and_keeps_gradients(num_tokens, num_experts, data):
    top_k = data.draw(st.integers(1, num_experts))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    scores = torch.randn(num_tokens, num_experts, generator=generator).requires_grad_()
    native, native_ids = scores.topk(top_k, dim=1)
    order = torch.argsort(torch.rand(num_tokens, top_k, generator=generator), dim=1)
    values, ids = replay(scores, native_ids, native_ids.gather(1, order) + 1)
    assert torch.equal(values, native) and torch.equal(ids, native_ids)
    other = torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(num_tokens)])
    free = torch.rand(num_tokens, generator=generator) < 0.3
    values, ids = replay(scores, native_ids, torch.where(free[:, None], 0, other + 1))
    expected = torch.where(free[:, None], native_ids, other)
    assert torch.equal(ids.sort(1).values, expected.sort(1).values)
    (grad,) = torch.autograd.grad(values.sum(), scores)
    assert torch.equal(grad, torch.zeros_like(scores).scatter(1, ids, 1.0))


def brute_force_balance(
    logits: Tensor, routing_map: Tensor, sequences: Tensor, num_sequences: int, top_k: int
) -> Tensor:
    """DeepSeek-V3 eq. 17 to 20 times T_s, computed by the paper's sums."""
    total, num_experts = torch.zeros(()), logits.shape[1]
    for index in range(num_sequences):
        rows = (sequences == index).nonzero()[:, 0].tolist()
        for expert in range(num_experts):
            f = num_experts / (top_k * max(len(rows), 1)) * sum(float(routing_map[row, expert]) for row in rows)
            p = sum(torch.softmax(logits[row], 0)[expert] for row in rows) if rows else 0.0
            total = total + f * p
    return total


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(2, 5), st.integers(0, 10**6))
def test_balance_loss_equals_the_paper_and_ignores_padding(lengths, num_experts, seed):
    generator = torch.Generator().manual_seed(seed)
    sequences = torch.tensor([index for index, length in enumerate(lengths) for _ in range(length)] + [-1, -1])
    logits = torch.randn(len(sequences), num_experts, generator=generator, dtype=torch.float32).requires_grad_()
    routing_map = torch.zeros(len(sequences), num_experts, dtype=torch.bool)
    routing_map.scatter_(1, logits.topk(2, dim=1).indices, True)
    scores = normalized_scores(logits, "softmax")
    loss = sequence_balance_loss(scores, routing_map, sequences, torch.tensor(lengths), topk=2)
    expected = brute_force_balance(logits, routing_map, sequences, len(lengths), 2)
    torch.testing.assert_close(loss, expected.to(loss), rtol=1e-5, atol=1e-6)
    (grad,) = torch.autograd.grad(loss, logits)
    assert (grad[-2:] == 0).all()


def test_balance_loss_is_minimal_for_even_loads():
    even = torch.zeros(8, 4, dtype=torch.bool)
    even[torch.arange(8), torch.arange(8) % 4] = True
    uniform = torch.full((8, 4), 0.25)
    sequence, lengths = torch.zeros(8, dtype=torch.int64), torch.tensor([8])
    assert sequence_balance_loss(uniform, even, sequence, lengths, topk=1) == pytest.approx(8.0)
    skewed = torch.zeros(8, 4, dtype=torch.bool)
    skewed[:, 0] = True
    sure = torch.tensor([[0.7, 0.1, 0.1, 0.1]]).expand(8, 4)
    assert sequence_balance_loss(sure, skewed, sequence, lengths, topk=1) == pytest.approx(8 * 4 * 0.7)


def test_load_metrics_cover_moe_layers_only():
    loads = torch.tensor([[2.0, 2, 2, 2], [0, 0, 0, 0], [6, 0, 2, 0]])
    metrics = {name: total / denominator for name, (total, denominator) in load_metrics(loads).items()}
    entropy = (1.0 - (0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)) / 2
    assert metrics == pytest.approx({"moe_max_load": 3.0, "moe_dead_share": 0.25, "moe_load_entropy": entropy})
    assert load_metrics(torch.zeros(2, 4)) == {}


def test_expert_bias_rises_for_idle_and_falls_for_busy_experts():
    bias = updated_bias(torch.tensor([0.5, 0.0, -0.5]), torch.tensor([9.0, 6.0, 3.0], dtype=torch.float64), 0.1)
    torch.testing.assert_close(bias, torch.tensor([0.4, 0.0, -0.4]))


def test_recomputed_layers_are_counted_and_recorded_once():
    rows = torch.tensor([0, 2, -1])
    account = RoutingStats(torch.zeros(2, 4, dtype=torch.float64), recorded=torch.zeros(3, 2, 2, dtype=torch.int16))
    trace = new_trace(rows, torch.tensor([0, 3]), account)
    assert trace.real.tolist() == [0, 1] and trace.sequences.tolist() == [0, 0, -1]
    ids = torch.tensor([[0, 1], [1, 3], [2, 3]])
    routing_map = torch.zeros(3, 4, dtype=torch.bool).scatter(1, ids, True)
    assert trace.note(1, routing_map, ids, None)
    assert not trace.note(1, routing_map, ids, None)
    # A chunk with other layers of the same micro-batch uses the same account.
    assert not new_trace(rows, torch.tensor([0, 3]), account).note(1, routing_map, ids, None)
    assert account.loads.tolist() == [[0, 0, 0, 0], [1, 2, 0, 1]]
    assert account.recorded[:, 1].tolist() == [[1, 2], [0, 0], [2, 4]] and (account.recorded[:, 0] == 0).all()
    # A fused router returns no ids.
    assert trace.note(0, routing_map, None, None) and not trace.note(0, routing_map, None, None)
    assert torch.equal(account.loads[0], account.loads[1])


def test_padding_and_incomplete_records_are_routed_natively():
    account = RoutingStats(torch.zeros(1, 4, dtype=torch.float64))
    routes = torch.tensor([[[1, 2]], [[3, 4]], [[0, 2]]], dtype=torch.int16)
    trace = new_trace(torch.tensor([1, 0, -1, 2]), torch.tensor([0, 3]), account, replayed=routes)
    assert trace.wanted(0).tolist() == [[3, 4], [1, 2], [0, 0], [0, 0]]


def config_of(model_type: str, **fields):
    declare_torchvision_ops()
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **fields)


@pytest.mark.parametrize(
    "settings,model_type,message",
    [
        (MoeConfig(routing_replay=RoutingReplay.R2), "qwen2", "routing_replay=R2: needs a mixture-of-experts model"),
        (MoeConfig(load_balancing=LoadBalancing.aux_loss), "llama", "load_balancing=aux_loss: needs a mixture"),
        (MoeConfig(load_balancing=LoadBalancing.bias), "qwen3_moe", "no expert bias"),
        (MoeConfig(dispatcher=Dispatcher.flex), "mixtral", "needs GPUs, and none is present; use alltoall"),
        (MoeConfig(grouped_gemm=GroupedGemm.always), "mixtral", "needs a GPU; none is present; set auto or never"),
    ],
)
def test_unsupported_moe_settings_are_rejected(settings, model_type, message):
    if torch.cuda.is_available() and "GPU" in message:
        pytest.skip("refused only where no GPU is present")
    with pytest.raises(ModelError, match=message):
        check_moe(settings, config_of(model_type), ParallelConfig())


def test_default_moe_settings_fit_every_model():
    for model_type in ("qwen2", "qwen3_moe", "mixtral", "deepseek_v3"):
        check_moe(MoeConfig(), config_of(model_type), ParallelConfig())
    check_moe(MoeConfig(load_balancing=LoadBalancing.bias), config_of("deepseek_v3"), ParallelConfig())
    check_moe(MoeConfig(dispatcher=Dispatcher.allgather), config_of("qwen3_moe"), ParallelConfig())


def test_experts_are_chosen_best_first_also_without_gradients() -> None:
    """Sums over a token's experts then round as they do in an update."""
    choice, logits = _Choice(), torch.randn(200, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        topk_routing_with_score_function(logits, 6, score_function="sigmoid", router_replay=choice)
    assert (logits.gather(1, choice.chosen).diff() <= 0).all()
