"""gpt-oss: every second layer attends to a window, each head has a learned sink, experts and attention have biases (arXiv 2508.10925)."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.families.family import JOINED, Experts, Family, ModelConfig, Rule, SGLangSupport
from megatron_rl.families.layer_rules import ATTENTION, NORMS, QKV_BIAS, STACKED_DOWN, moe_kwargs
from megatron_rl.families.transforms import ColumnParallel, GatedMLP, Interleaved, Replicated, Transposed

_BIASES_AND_SINKS = (
    *QKV_BIAS,
    Rule("self_attention.linear_proj.bias", {"self_attn.o_proj.bias": ("hidden",)}, Replicated()),
    Rule("self_attention.core_attention.softmax_offset", {"self_attn.sinks": ("heads",)}, ColumnParallel()),
)
_EXPERTS = (
    Rule("mlp.router.weight", {"mlp.router.weight": ("experts", "hidden")}, Replicated()),
    Rule("mlp.router.bias", {"mlp.router.bias": ("experts",)}, Replicated()),
    Rule(
        "mlp.experts.{expert}.linear_fc1.weight",
        {"mlp.experts.gate_up_proj": ("experts", "hidden", "expert_gate_up")},
        Transposed(Interleaved(GatedMLP())),
        is_stacked=True,
    ),
    Rule(
        "mlp.experts.{expert}.linear_fc1.bias",
        {"mlp.experts.gate_up_proj_bias": ("experts", "expert_gate_up")},
        Interleaved(GatedMLP()),
        is_stacked=True,
    ),
    STACKED_DOWN,
    Rule(
        "mlp.experts.{expert}.linear_fc2.bias",
        {"mlp.experts.down_proj_bias": ("experts", "hidden")},
        Replicated(),
        is_stacked=True,
    ),
)


def _window(config: ModelConfig, layer: int) -> int | None:
    kinds = getattr(config, "layer_types", None)
    # Without the field, transformers gives every second layer a window, beginning with the first.
    is_windowed = kinds[layer : layer + 1] == ["sliding_attention"] if kinds else layer % 2 == 0
    return getattr(config, "sliding_window", 128) if is_windowed else None


def _transformer_kwargs(config: ModelConfig) -> dict[str, Any]:
    windows = [_window(config, layer) for layer in range(config.num_hidden_layers)]
    longest = max(window or 0 for window in windows)
    return dict(
        moe_kwargs(config),
        moe_router_pre_softmax=False,
        add_bias_linear=True,
        softmax_type="learnable",
        # Megatron counts the previous tokens.
        window_size=(longest - 1, 0) if longest else None,
        window_attn_skip_freq=[int(bool(window)) for window in windows],
        activation_func="quick_gelu",
        activation_func_clamp_value=config.swiglu_limit,
        glu_linear_offset=1.0,
        # Megatron's fused kernel clamps before it adds the bias.
        bias_activation_fusion=False,
    )


def _problems(model: Mapping[str, Any], where: str) -> Iterator[str]:
    if model.get("quantization_config"):
        yield (
            f"{where}: quantization_config: servers would keep the weights in MXFP4, and take no weights of the trainer; make a copy "
            "in bfloat16: megatron-rl convert --to megatron, then --to hf"
        )


FAMILY = Family(
    layer=lambda config, index: (*NORMS, *ATTENTION, *_BIASES_AND_SINKS, *_EXPERTS),
    transformer_kwargs=_transformer_kwargs,
    # The factor in the gate's sigmoid is the constant of Megatron's quick_gelu.
    forbidden={"attention_bias": True, "swiglu_alpha": 1.702, "norm_topk_prob": True},
    experts=Experts(
        in_layer=lambda config, index: True, number=("num_local_experts", "num_experts"), ffn_size="intermediate_size"
    ),
    window=_window,
    unsplit={
        "expert_tensor_parallel_size": "Megatron would add the experts' biases once per rank",
        "context_parallel_size": "Transformer Engine has sinks only with an exchange of heads, which this trainer does not set up",
    },
    reads_mxfp4=True,
    served=SGLangSupport(
        joined={
            **JOINED,
            "gate_up_proj": ("w13_weight", 0),
            "gate_up_proj_bias": ("w13_weight_bias", 0),
            "down_proj": ("w2_weight", 0),
            "down_proj_bias": ("w2_weight_bias", 0),
        },
        float32=("w13_weight_bias", "w2_weight_bias"),
        is_never_tied=True,
        problems=_problems,
    ),
)
