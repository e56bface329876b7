"""Rules of decoder layers, and Megatron's arguments for experts, that several families share."""

from typing import Any

from megatron_rl.families.family import ModelConfig, Rule
from megatron_rl.families.model_facts import dims, has_experts, router_groups, text_config
from megatron_rl.families.transforms import QKV, GatedMLP, Replicated, RowParallel, Transposed

NORMS = (
    Rule("input_layernorm.weight", {"input_layernorm.weight": ("hidden",)}, Replicated()),
    Rule("pre_mlp_layernorm.weight", {"post_attention_layernorm.weight": ("hidden",)}, Replicated()),
)
ATTENTION = (
    Rule(
        "self_attention.linear_qkv.weight",
        {
            "self_attn.q_proj.weight": ("q", "hidden"),
            "self_attn.k_proj.weight": ("kv", "hidden"),
            "self_attn.v_proj.weight": ("kv", "hidden"),
        },
        QKV(),
    ),
    Rule("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": ("hidden", "q")}, RowParallel()),
)
QKV_BIAS = (
    Rule(
        "self_attention.linear_qkv.bias",
        {"self_attn.q_proj.bias": ("q",), "self_attn.k_proj.bias": ("kv",), "self_attn.v_proj.bias": ("kv",)},
        QKV(),
    ),
)
QK_NORM = (
    Rule("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": ("head_dim",)}, Replicated()),
    Rule("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": ("head_dim",)}, Replicated()),
)


def gated_mlp(megatron: str, hf: str, size: str) -> tuple[Rule, ...]:
    """Rules of a gated MLP with ``size`` inner features; ``megatron``, ``hf``: its names in Megatron and in the checkpoint."""
    return (
        Rule(
            f"{megatron}.linear_fc1.weight",
            {f"{hf}.gate_proj.weight": (size, "hidden"), f"{hf}.up_proj.weight": (size, "hidden")},
            GatedMLP(),
        ),
        Rule(f"{megatron}.linear_fc2.weight", {f"{hf}.down_proj.weight": ("hidden", size)}, RowParallel()),
    )


DENSE_MLP = gated_mlp("mlp", "mlp", "ffn")


def expert_mlp(prefix: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Rules of a router and its experts; the arguments are the names of the modules in the checkpoint."""
    expert = f"{prefix}.experts.{{expert}}"
    return (
        Rule("mlp.router.weight", {f"{prefix}.gate.weight": ("experts", "hidden")}, Replicated()),
        Rule(
            "mlp.experts.{expert}.linear_fc1.weight",
            {f"{expert}.{gate}.weight": ("expert_ffn", "hidden"), f"{expert}.{up}.weight": ("expert_ffn", "hidden")},
            GatedMLP(),
        ),
        Rule(
            "mlp.experts.{expert}.linear_fc2.weight",
            {f"{expert}.{down}.weight": ("hidden", "expert_ffn")},
            RowParallel(),
        ),
    )


STACKED_DOWN = Rule(
    "mlp.experts.{expert}.linear_fc2.weight",
    {"mlp.experts.down_proj": ("experts", "expert_ffn", "hidden")},
    Transposed(RowParallel()),
    is_stacked=True,
)
EXPERTS = expert_mlp("mlp", "gate_proj", "up_proj", "down_proj")
_BIASED_EXPERTS = (
    *EXPERTS,
    Rule("mlp.router.expert_bias", {"mlp.gate.e_score_correction_bias": ("experts",)}, Replicated()),
)
_SHARED_EXPERTS = gated_mlp("mlp.shared_experts", "mlp.shared_experts", "shared_ffn")


def biased_experts(config: ModelConfig) -> tuple[Rule, ...]:
    """Rules of DeepSeek-V3's experts: a bias on the router's choice and, if the model has them, shared experts."""
    return (*_BIASED_EXPERTS, *_SHARED_EXPERTS) if dims(config)["shared_ffn"] else _BIASED_EXPERTS


def moe_kwargs(config: ModelConfig) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig for a model with experts in some layers."""
    sizes, moe_layers = dims(config), has_experts(config)
    kwargs = dict(
        num_moe_experts=sizes["experts"],
        moe_ffn_hidden_size=sizes["expert_ffn"],
        moe_router_topk=text_config(config).num_experts_per_tok,
        # Off, because models/layers/routing.py has its own load balancing.
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_dtype="fp32",
    )
    if not all(moe_layers):
        kwargs["moe_layer_freq"] = [int(is_moe) for is_moe in moe_layers]
    return kwargs


def biased_router_kwargs(config: ModelConfig) -> dict[str, Any]:
    """Fields of TransformerConfig for DeepSeek-V3's router: sigmoid scores, a bias on the choice only, limited groups."""
    groups, chosen_groups = router_groups(config)
    limits_groups = chosen_groups < groups
    return dict(
        moe_kwargs(config),
        moe_shared_expert_intermediate_size=dims(config)["shared_ffn"] or None,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.0,
        moe_router_num_groups=groups if limits_groups else None,
        moe_router_group_topk=chosen_groups if limits_groups else None,
        moe_router_topk_scaling_factor=config.routed_scaling_factor,
    )
