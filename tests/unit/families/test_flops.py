"""The cost of a sequence against the operations counted on transformers' models (megatron_rl/families/flops.py)."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_rl.families.flops import flops_cost
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops

declare_torchvision_ops()

COMMON = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)
MODELS = {
    "llama": dict(model_type="llama"),
    "qwen2_tied": dict(model_type="qwen2", tie_word_embeddings=True),
    "qwen3_wide_heads": dict(model_type="qwen3", head_dim=48),
    "qwen3_moe": dict(
        model_type="qwen3_moe", head_dim=32, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40
    ),
    "mixtral": dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "deepseek_v3": dict(
        model_type="deepseek_v3",
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=20,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        moe_intermediate_size=28,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
    ),
    "glm4_moe": dict(
        model_type="glm4_moe",
        head_dim=24,
        moe_intermediate_size=28,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    # a window longer than one of the lengths
    "gpt_oss": dict(
        model_type="gpt_oss", num_hidden_layers=5, head_dim=24, num_local_experts=6, num_experts_per_tok=2, sliding_window=11
    ),
}


def config_of(name: str):
    fields = {**COMMON, **MODELS[name]}
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def counted_flops(config, length: int) -> int:
    """Operations counted on transformers' eager model, whose attention computes all length^2 pairs and masks half of them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    model.eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(0, config.vocab_size, (1, length)), use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [7, 200])
def test_flops_equal_those_counted_on_transformers(name, length):
    config = config_of(name)
    flops = flops_cost(config)
    expected = flops.per_token * length + (flops.per_pair + sum(flops.per_windowed_pair.values())) * length**2
    assert counted_flops(config, length) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_attention_flops_count_the_pairs_of_the_causal_mask(name):
    flops = flops_cost(config_of(name))
    mask = torch.ones(50, 50).tril()
    pairs = {50: mask.sum(), **{window: mask.triu(1 - window).sum() for window in flops.per_windowed_pair}}
    expected = sum(float(pairs[window]) * per_pair for window, per_pair in ({50: flops.per_pair} | flops.per_windowed_pair).items())
    assert flops(50) == pytest.approx(50 * flops.per_token + expected)
    assert (sorted(flops.per_windowed_pair) == [11]) == (name == "gpt_oss")


def test_critic_flops_have_one_output_instead_of_a_vocabulary():
    config = config_of("llama")
    policy, critic = flops_cost(config), flops_cost(config, role="critic")
    assert policy.per_token - critic.per_token == 2 * (config.vocab_size - 1) * config.hidden_size
    assert policy.per_pair == critic.per_pair
