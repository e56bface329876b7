"""Mapping from a checkpoint's tensors to SGLang's parameters."""

from megatron_rl.families.sglang_names import joined_name


def test_names_present_on_the_server_are_not_joined():
    assert joined_name("mlp.gate_proj.weight", {"mlp.gate_proj.weight"}) == ("mlp.gate_proj.weight", 0)
    assert joined_name("mlp.up_proj.bias", {"mlp.gate_up_proj.bias"}) == ("mlp.gate_up_proj.bias", 1)
    assert joined_name("mlp.up_proj.bias", {"norm.weight"}) is None
