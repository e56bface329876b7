"""Patterns of tensors that do not train: what they match, and what is refused."""

import pytest

from megatron_rl.errors import ModelError
from megatron_rl.families.parameters import entries, frozen_parameters
from tests.tiny_families import SHAPES, family_config

CONFIGS = {name: family_config(name) for name in SHAPES}


@pytest.mark.parametrize("shape", CONFIGS)
def test_frozen_attention_is_the_attention_of_every_layer_without_the_norm_before_it(shape):
    """The norm before it is a parameter of the attention's first linear layer in Transformer Engine; by its name it is none."""
    config = CONFIGS[shape]
    frozen = frozen_parameters(config, "critic", ["*_attn.*"])
    expected = {e.megatron for e in entries(config, "critic") if ".self_attention." in e.megatron}
    assert frozen == expected and frozen
    assert not any("input_layernorm" in name for name in frozen)


def test_patterns_match_whole_names_of_one_layer_or_several():
    config = CONFIGS["qwen3_wide_heads_yarn"]
    one = frozen_parameters(config, "critic", ["model.layers.1.*"])
    assert one and all(name.startswith("decoder.layers.1.") for name in one)
    both = frozen_parameters(config, "critic", ["model.layers.[01].*", "model.embed_tokens.weight"])
    assert one < both and "embedding.word_embeddings.weight" in both


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["self_attn"], "'self_attn' matches no tensor of the model; its tensors are model.embed_tokens.weight"),
        (["*.self_attn.*", "*.attention.*"], "'.*attention.*' matches no tensor"),
        (["*.q_proj.weight"], "q_proj.weight: one parameter in Megatron together with .*k_proj.weight.*; match all of them"),
        (["*.gate_proj.*"], "one parameter in Megatron together with .*up_proj"),
        (["*"], "nothing would train"),
    ],
)
def test_patterns_that_cannot_be_followed_are_refused(patterns, words):
    with pytest.raises(ModelError, match=words):
        frozen_parameters(CONFIGS["qwen3_wide_heads_yarn"], "critic", patterns)
