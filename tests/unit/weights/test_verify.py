"""Laws of the checksum comparison that need no server."""

import hashlib

import pytest
import torch

from megatron_rl.weights.verify import _compare_with_each_other, _compare_with_trainer

URL = "http://server"


def checksum(*parts: torch.Tensor) -> str:
    """SGLang's checksum of a parameter on CPU (sglang.srt.managers.mm_utils.tensor_hash)."""
    joined = torch.cat([part.flatten() for part in parts])
    return hashlib.sha256(joined.view(torch.uint8).numpy().tobytes()).digest()[:8].hex()


INNER = 32
"""Inner features of an expert, which servers on a CPU need not pad."""
EXPERTS = {
    f"mlp.experts.{expert}.{projection}.weight": torch.randn((2, INNER) if projection == "down_proj" else (INNER, 2))
    for expert in (1, 0)
    for projection in ("down_proj", "up_proj", "gate_proj")
}
TRAINER = {
    "self_attn.k_proj.weight": torch.randn(2, 4),
    "self_attn.q_proj.weight": torch.randn(4, 4),
    "self_attn.v_proj.weight": torch.randn(2, 4),
    "embed_tokens.weight": torch.randn(5, 4),
    **EXPERTS,
}
SERVER = {
    "self_attn.qkv_proj.weight": checksum(*(TRAINER[f"self_attn.{part}_proj.weight"] for part in "qkv")),
    "embed_tokens.weight": checksum(TRAINER["embed_tokens.weight"], torch.zeros(59, 4)),
    "mlp.experts.w13_weight": checksum(
        *(EXPERTS[f"mlp.experts.{e}.{p}_proj.weight"] for e in (0, 1) for p in ("gate", "up"))
    ),
    "mlp.experts.w2_weight": checksum(*(EXPERTS[f"mlp.experts.{e}.down_proj.weight"] for e in (0, 1))),
}


def compare(trainer: dict, server: dict = SERVER, dtype: torch.dtype = torch.float32):
    return _compare_with_trainer({URL: [server]}, dtype, iter(trainer.items()))


def test_parts_in_any_order_give_the_joined_padded_parameter():
    for weights in (TRAINER, dict(reversed(TRAINER.items()))):
        report = compare(weights)
        assert (report.num_compared, dict(report.differing), report.uncompared) == (4, {}, ())


@pytest.mark.parametrize("name", TRAINER)
def test_changed_part_is_a_difference(name):
    changed = TRAINER | {name: TRAINER[name] + 1e-6 + TRAINER[name].abs() * 1e-6}
    assert len(compare(changed).differing[URL]) == 1


@pytest.mark.parametrize("name", [name for name in TRAINER if name != "embed_tokens.weight"])
def test_missing_part_is_a_difference(name):
    report = compare({other: weight for other, weight in TRAINER.items() if other != name})
    assert len(report.differing[URL]) == 1


def test_server_may_keep_some_parameters_in_the_trainers_dtype():
    trainer = {"norm.weight": torch.randn(4), "bias": torch.randn(4)}
    server = {"norm.weight": checksum(trainer["norm.weight"].bfloat16()), "bias": checksum(trainer["bias"])}
    assert compare(trainer, server, torch.bfloat16).differing == {}


def test_server_keeps_parameters_of_some_families_in_float32():
    trainer = {"linear_attn.A_log": torch.randn(4).bfloat16(), "norm.weight": torch.randn(4).bfloat16()}
    server = {name: checksum(tensor.float()) for name, tensor in trainer.items()}
    assert compare(trainer, server, torch.bfloat16).differing == {URL: ("norm.weight",)}


def padded(weight: torch.Tensor, rows: int = 0, columns: int = 0) -> torch.Tensor:
    return torch.nn.functional.pad(weight, (0, columns, 0, rows))


def gated(prefix: str, inner: int, hidden: int = 4) -> dict[str, torch.Tensor]:
    shapes = {"gate_proj": (inner, hidden), "down_proj": (hidden, inner), "up_proj": (inner, hidden)}
    return {f"{prefix}.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def test_mlps_are_padded_as_servers_on_a_cpu_pad_them():
    """Rows of gate and up, columns of down, and of their biases; three shared experts of 20 features become three of 32."""
    dense, expert, shared = gated("mlp", 80), gated("mlp.experts.0", 28), gated("mlp.shared_experts", 60)
    biases = {"mlp.gate_proj.bias": torch.randn(80), "mlp.up_proj.bias": torch.randn(80), "mlp.down_proj.bias": torch.randn(4)}
    server = {"mlp.down_proj.bias": checksum(biases["mlp.down_proj.bias"])}
    for weights, zeros, joined, down in (
        (dense, 16, "mlp.gate_up_proj.weight", "mlp.down_proj.weight"),
        (expert, 4, "mlp.experts.w13_weight", "mlp.experts.w2_weight"),
        (shared, 36, "mlp.shared_experts.gate_up_proj.weight", "mlp.shared_experts.down_proj.weight"),
    ):
        gate_weight, down_weight, up_weight = weights.values()
        server[joined] = checksum(padded(gate_weight, rows=zeros), padded(up_weight, rows=zeros))
        server[down] = checksum(padded(down_weight, columns=zeros))
    server["mlp.gate_up_proj.bias"] = checksum(*(torch.cat([biases[f"mlp.{p}_proj.bias"], torch.zeros(16)]) for p in ("gate", "up")))
    trainer = {**dense, **expert, **shared, **biases}
    report = _compare_with_trainer({URL: [server]}, torch.float32, iter(trainer.items()), num_shared_experts=3)
    assert (report.num_compared, dict(report.differing), report.uncompared) == (8, {}, ())
    one = _compare_with_trainer({URL: [server]}, torch.float32, iter(trainer.items()), num_shared_experts=1)
    assert one.differing[URL] == ("mlp.shared_experts.gate_up_proj.weight", "mlp.shared_experts.down_proj.weight")


def test_stacked_experts_of_gpt_oss_are_compared():
    """Files have [experts, hidden, gate and up alternating] and [experts, inner, hidden]; servers the transposed, and biases in float32."""
    names = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    shapes = ((3, 4, 56), (3, 56), (3, 28, 4), (3, 4))
    trainer = {f"mlp.experts.{name}": torch.randn(shape).bfloat16() for name, shape in zip(names, shapes, strict=True)}
    both, both_bias, down, down_bias = trainer.values()
    server = {
        "mlp.experts.w13_weight": checksum(padded(both.transpose(1, 2), rows=8)),
        "mlp.experts.w13_weight_bias": checksum(padded(both_bias, columns=8).float()),
        "mlp.experts.w2_weight": checksum(padded(down.transpose(1, 2), columns=4)),
        "mlp.experts.w2_weight_bias": checksum(down_bias.float()),
    }
    report = compare(trainer, server, torch.bfloat16)
    assert (report.num_compared, dict(report.differing), report.uncompared) == (4, {}, ())


def test_parameters_of_only_one_side_are_listed():
    report = compare({"norm.weight": torch.ones(1), "lm_head.weight": torch.ones(1)}, {"norm.weight": "x", "bias": "y"})
    assert report.uncompared == ("lm_head.weight", "bias")


def test_servers_of_the_same_size_are_compared_rank_by_rank():
    report = _compare_with_each_other(
        {"a": [{"w": "1"}, {"w": "2"}], "b": [{"w": "1"}], "c": [{"w": "1"}, {"w": "3"}]}, "note"
    )
    assert (report.reference, report.num_compared) == ("servers", 2)
    assert report.differing == {"c": ("w (rank 1)",)}
    assert _compare_with_each_other({"a": [{"w": "1"}], "b": [{"w": "1"}, {"w": "1"}]}, "note").reference == "nothing"
