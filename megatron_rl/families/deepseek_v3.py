"""DeepSeek-V3 and R1: latent attention, experts with a bias on the router's choice (arXiv 2412.19437)."""

from typing import Any

from megatron_rl.families.family import JOINED, Experts, Family, ModelConfig, Rule, SGLangSupport
from megatron_rl.families.layer_rules import DENSE_MLP, NORMS, biased_experts, biased_router_kwargs
from megatron_rl.families.model_facts import has_experts
from megatron_rl.families.transforms import ColumnParallel, Replicated, RowParallel

_LATENT_QUERY = (
    Rule(
        "self_attention.linear_q_down_proj.weight", {"self_attn.q_a_proj.weight": ("q_latent", "hidden")}, Replicated()
    ),
    Rule("self_attention.q_layernorm.weight", {"self_attn.q_a_layernorm.weight": ("q_latent",)}, Replicated()),
    Rule("self_attention.linear_q_up_proj.weight", {"self_attn.q_b_proj.weight": ("q", "q_latent")}, ColumnParallel()),
)
_PLAIN_QUERY = (Rule("self_attention.linear_q_proj.weight", {"self_attn.q_proj.weight": ("q", "hidden")}, ColumnParallel()),)
_LATENT_KEY_VALUE = (
    Rule(
        "self_attention.linear_kv_down_proj.weight",
        {"self_attn.kv_a_proj_with_mqa.weight": ("kv_down", "hidden")},
        Replicated(),
    ),
    Rule("self_attention.kv_layernorm.weight", {"self_attn.kv_a_layernorm.weight": ("kv_latent",)}, Replicated()),
    Rule("self_attention.linear_kv_up_proj.weight", {"self_attn.kv_b_proj.weight": ("kv_up", "kv_latent")}, ColumnParallel()),
    Rule("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": ("hidden", "attended")}, RowParallel()),
)


def _layer(config: ModelConfig, index: int) -> tuple[Rule, ...]:
    query = _PLAIN_QUERY if config.q_lora_rank is None else _LATENT_QUERY
    mlp = biased_experts(config) if has_experts(config)[index] else DENSE_MLP
    return (*NORMS, *query, *_LATENT_KEY_VALUE, *mlp)


def _transformer_kwargs(config: ModelConfig) -> dict[str, Any]:
    return dict(
        biased_router_kwargs(config),
        multi_latent_attention=True,
        qk_layernorm=True,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_head_dim=config.qk_nope_head_dim,
        qk_pos_emb_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        # Not fused, because the fused kernel computes its own frequencies.
        apply_rope_fusion=False,
    )


FAMILY = Family(
    layer=_layer,
    transformer_kwargs=_transformer_kwargs,
    forbidden={
        "attention_bias": False,
        "rope_interleave": True,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        # transformers computes the norms of the latents with this constant and ignores the field.
        "rms_norm_eps": 1e-6,
    },
    experts=Experts(
        # 3 is the default of transformers if config.json omits the field.
        in_layer=lambda config, index: index >= getattr(config, "first_k_dense_replace", 3),
        number=("n_routed_experts", "num_local_experts"),
        groups=("n_group", "topk_group"),
        has_bias=True,
    ),
    is_latent=True,
    num_mtp_layers="num_nextn_predict_layers",
    served=SGLangSupport(
        joined={
            **JOINED,
            "q_a_proj": ("fused_qkv_a_proj_with_mqa", 0),
            "kv_a_proj_with_mqa": ("fused_qkv_a_proj_with_mqa", 1),
        },
        rope_is_yarn=True,
    ),
)
