"""Rules of dense decoder layers that several families share (see ``experts`` for mixtures of experts)."""

from megatron_rl.families.family import Rule
from megatron_rl.families.transforms import QKV, GatedMLP, Replicated, RowParallel

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
    """Rules of a gated MLP with ``size`` inner features, under these two names."""
    return (
        Rule(
            f"{megatron}.linear_fc1.weight",
            {f"{hf}.gate_proj.weight": (size, "hidden"), f"{hf}.up_proj.weight": (size, "hidden")},
            GatedMLP(),
        ),
        Rule(f"{megatron}.linear_fc2.weight", {f"{hf}.down_proj.weight": ("hidden", size)}, RowParallel()),
    )


DENSE_MLP = gated_mlp("mlp", "mlp", "ffn")
