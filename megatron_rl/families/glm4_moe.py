"""GLM-4.5 and later: attention as in Qwen3 (bias and norms optional), experts as in DeepSeek-V3."""

from typing import Any

from megatron_rl.families.family import Experts, Family, ModelConfig, Rule, SGLangSupport
from megatron_rl.families.layer_rules import (
    ATTENTION,
    DENSE_MLP,
    NORMS,
    QK_NORM,
    QKV_BIAS,
    biased_experts,
    biased_router_kwargs,
)
from megatron_rl.families.model_facts import has_experts


def _layer(config: ModelConfig, index: int) -> tuple[Rule, ...]:
    bias = QKV_BIAS if config.attention_bias else ()
    norm = QK_NORM if config.use_qk_norm else ()
    mlp = biased_experts(config) if has_experts(config)[index] else DENSE_MLP
    return (*NORMS, *ATTENTION, *bias, *norm, *mlp)


def _transformer_kwargs(config: ModelConfig) -> dict[str, Any]:
    return dict(
        biased_router_kwargs(config), add_qkv_bias=bool(config.attention_bias), qk_layernorm=bool(config.use_qk_norm)
    )


FAMILY = Family(
    layer=_layer,
    transformer_kwargs=_transformer_kwargs,
    forbidden={"norm_topk_prob": True},
    experts=Experts(
        # 1 is the default of transformers if config.json omits the field.
        in_layer=lambda config, index: index >= getattr(config, "first_k_dense_replace", 1),
        number=("n_routed_experts", "num_local_experts"),
        groups=("n_group", "topk_group"),
        has_bias=True,
    ),
    takes_partial_rotary=True,
    num_mtp_layers="num_nextn_predict_layers",
    served=SGLangSupport(float32=("mlp.gate.weight",), is_never_tied=True),
)
