"""Which of SGLang's parameters holds a checkpoint's tensor."""

from megatron_rl.families.sglang_names import joined_name


def test_names_the_server_holds_itself_are_not_joined():
    assert joined_name("mlp.gate_proj.weight", {"mlp.gate_proj.weight"}) == ("mlp.gate_proj.weight", 0)
    assert joined_name("mlp.up_proj.bias", {"mlp.gate_up_proj.bias"}) == ("mlp.gate_up_proj.bias", 1)
    assert joined_name("mlp.up_proj.bias", {"norm.weight"}) is None
