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


EXPERTS = {
    f"mlp.experts.{expert}.{projection}.weight": torch.randn(2, 3)
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
