"""Qwen3 with experts in all layers, or in some of them."""

from typing import Any

from megatron_rl.families.family import Experts, Family, ModelConfig, Rule, SGLangSupport
from megatron_rl.families.layer_rules import ATTENTION, DENSE_MLP, EXPERTS, NORMS, QK_NORM, moe_kwargs
from megatron_rl.families.model_facts import has_experts

NUM_EXPERTS = ("num_experts", "num_local_experts")
"""Field with the number of experts: its name on the hub, and its name as saved by transformers 5."""


def in_layer(text: ModelConfig, index: int) -> bool:
    """Return whether layer ``index`` has experts; ``text`` is the language model's configuration."""
    # Defaults, because config.json may omit both fields.
    step, dense = getattr(text, "decoder_sparse_step", 1), getattr(text, "mlp_only_layers", None) or []
    has_any = any(getattr(text, name, None) for name in NUM_EXPERTS)
    return has_any and index not in dense and (index + 1) % step == 0


def _layer(config: ModelConfig, index: int) -> tuple[Rule, ...]:
    return (*NORMS, *ATTENTION, *QK_NORM, *(EXPERTS if has_experts(config)[index] else DENSE_MLP))


def _transformer_kwargs(config: ModelConfig) -> dict[str, Any]:
    return dict(moe_kwargs(config), qk_layernorm=True, moe_router_pre_softmax=not config.norm_topk_prob)


FAMILY = Family(
    layer=_layer,
    transformer_kwargs=_transformer_kwargs,
    forbidden={"use_sliding_window": False, "attention_bias": False},
    experts=Experts(in_layer=in_layer, number=NUM_EXPERTS),
    served=SGLangSupport(is_sparse_everywhere=True, is_never_tied=True),
)
