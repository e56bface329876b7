"""Tiny models of unusual shapes for every family, with each variation of real checkpoints at least once."""

import json
from pathlib import Path
from typing import Any

from megatron_rl.families.family import families
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from megatron_rl.system.megatron_core import release
from tests.tiny_models import VECTOR_NOISE, WEIGHT_SCALE

COMMON: dict[str, Any] = dict(
    vocab_size=101,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    eos_token_id=1,
    pad_token_id=0,
    bos_token_id=None,
    tie_word_embeddings=False,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=16)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=22,
    kv_lora_rank=18,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=14,
    moe_intermediate_size=28,
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    first_k_dense_replace=1,
    routed_scaling_factor=2.5,
    num_nextn_predict_layers=0,
)
LINEAR = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=6,
    linear_value_head_dim=10,
    linear_conv_kernel_dim=3,
)
SHAPES: dict[str, dict[str, Any]] = {
    # GQA 7:1, QKV bias, tied embeddings, odd vocabulary
    "qwen2_gqa7_tied": dict(
        model_type="qwen2", hidden_size=84, num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True
    ),
    "qwen2_yarn_one_group": dict(
        model_type="qwen2",
        hidden_size=56,
        num_attention_heads=7,
        num_key_value_heads=1,
        rope_parameters={**YARN, "attention_factor": 0.8, "truncate": False},
    ),
    # heads wider than hidden / heads
    "qwen3_wide_heads_yarn": dict(model_type="qwen3", head_dim=20, rope_parameters=YARN),
    "llama3_scaled": dict(model_type="llama", head_dim=26, num_key_value_heads=4, rope_parameters=LLAMA3),
    "llama_linear_tied": dict(
        model_type="llama",
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e4),
    ),
    # every second layer dense, and raw softmax probabilities
    "qwen3_moe_sparse_step": dict(
        model_type="qwen3_moe",
        num_hidden_layers=4,
        head_dim=18,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=36,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        norm_topk_prob=False,
    ),
    "qwen3_moe": dict(
        model_type="qwen3_moe",
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=36,
        norm_topk_prob=True,
        tie_word_embeddings=True,
    ),
    "mixtral": dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3_yarn": dict(
        model_type="deepseek_v3", **LATENT, rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}
    ),
    "deepseek_v3_plain_query": dict(
        model_type="deepseek_v3", **{**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1}
    ),
    # one group of experts, and a yarn whose ramp has no width
    "kimi_k2": dict(
        model_type="kimi_k2",
        **{**LATENT, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
        **dict(moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc", seq_aux=True, ep_size=1),
        rope_parameters={**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    # the first half of each head rotates
    "glm4_moe_partial_rotary": dict(
        model_type="glm4_moe",
        head_dim=20,
        attention_bias=True,
        use_qk_norm=True,
        moe_intermediate_size=28,
        n_routed_experts=6,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        num_nextn_predict_layers=0,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
    ),
    # windows of 7 tokens in every second layer; a limit that clamps
    "gpt_oss": dict(
        model_type="gpt_oss",
        head_dim=20,
        num_hidden_layers=4,
        num_local_experts=6,
        num_experts_per_tok=3,
        sliding_window=7,
        swiglu_limit=1.5,
        rope_parameters={**YARN, "truncate": False},
    ),
}
LINEAR_SHAPES: dict[str, dict[str, Any]] = {
    # Layers of all four kinds: linear or softmax attention, experts or none; two value heads per key head, a kernel of three.
    "qwen3_next": dict(
        model_type="qwen3_next",
        **LINEAR,
        num_hidden_layers=4,
        head_dim=16,
        layer_types=["linear_attention", "linear_attention", "full_attention", "full_attention"],
        **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 36, "shared_expert_intermediate_size": 44},
        **{"mlp_only_layers": [1, 3], "norm_topk_prob": False},
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
    ),
    # one value head per key head, of another width; whole heads rotate
    "qwen3_5": dict(
        model_type="qwen3_5_text",
        **{**LINEAR, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 4},
        num_hidden_layers=4,
        head_dim=12,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=1.0),
    ),
    "qwen3_5_moe": dict(
        model_type="qwen3_5_moe_text",
        **LINEAR,
        num_hidden_layers=4,
        head_dim=16,
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 36, "shared_expert_intermediate_size": 20},
        rope_parameters={**YARN, "partial_rotary_factor": 0.25},
    ),
}
"""Models with linear attention, which Megatron Core 0.19 runs."""
if release() == "0.19":
    SHAPES |= LINEAR_SHAPES
VISION_TOKENS = dict(image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
TEXT = {**{name: COMMON[name] for name in COMMON if name != "tie_word_embeddings"}, "num_hidden_layers": 4}
VISION = dict(
    depth=3,
    hidden_size=32,
    intermediate_size=56,
    num_heads=2,
    in_channels=3,
    patch_size=4,
    temporal_patch_size=2,
    spatial_merge_size=2,
    out_hidden_size=48,
)
# SGLang pads the encoder's intermediate size to a multiple of 32 on a CPU, and cannot load this family's then.
DEEPSTACK = dict(VISION, intermediate_size=64, num_position_embeddings=36, deepstack_visual_indexes=[2, 0])
QWEN3_TEXT = dict(
    TEXT,
    head_dim=20,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[4, 3, 3], mrope_interleaved=True),
)
VISION_SHAPES: dict[str, dict[str, Any]] = {
    # windows of 2 x 2 merged patches in two of three layers; GQA 7:1 and tied embeddings
    "qwen2_5_vl": dict(
        model_type="qwen2_5_vl",
        text_config=dict(
            TEXT,
            hidden_size=84,
            num_attention_heads=14,
            num_key_value_heads=2,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[1, 1, 1]),
        ),
        vision_config=dict(VISION, out_hidden_size=84, window_size=16, fullatt_block_indexes=[1]),
        tie_word_embeddings=True,
        **VISION_TOKENS,
    ),
    # two of the first layers take features of encoder layers
    "qwen3_vl": dict(
        model_type="qwen3_vl",
        text_config=QWEN3_TEXT,
        vision_config=DEEPSTACK,
        tie_word_embeddings=False,
        **VISION_TOKENS,
    ),
    "qwen3_vl_moe": dict(
        model_type="qwen3_vl_moe",
        text_config=dict(QWEN3_TEXT, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=36),
        vision_config=DEEPSTACK,
        tie_word_embeddings=False,
        **VISION_TOKENS,
    ),
}


def make_vision_model(path: str | Path, shape: str, *, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Path:
    """``make_family_model`` for ``VISION_SHAPES``, with the files as the hub has them."""
    declare_torchvision_ops()
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(**{**VISION_SHAPES[shape], **overrides})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        for name, tensor in model.state_dict().items():
            # Gentler in the encoder: its features would drown the text's embeddings.
            if tensor.dim() > 1 and "visual" not in name:
                tensor.mul_(WEIGHT_SCALE)
            tensor.add_(torch.randn_like(tensor) * VECTOR_NOISE)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    _stack_as_on_the_hub(Path(path))
    return Path(path)


def _stack_as_on_the_hub(folder: Path) -> None:
    """The hub's files hold stacked experts transposed to what transformers saves."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    stacked = {n: t.transpose(1, 2).contiguous() for n, t in tensors.items() if n.endswith(("up_proj", "down_proj"))}
    if stacked:
        save_file({**tensors, **stacked}, file, metadata={"format": "pt"})


def family_config(shape: str, **overrides: Any) -> Any:
    """The configuration of ``SHAPES[shape]``, of the class in transformers as which the family is read."""
    from transformers import AutoConfig

    fields = {**COMMON, **(SHAPES | LINEAR_SHAPES)[shape], **overrides}
    config = AutoConfig.for_model(**{**fields, "model_type": families()[fields["model_type"]].read_as or fields["model_type"]})
    config.model_type = fields["model_type"]
    return config


def make_family_model(path: str | Path, shape: str, *, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Path:
    """Write config.json and safetensors of ``SHAPES[shape]`` with random weights to ``path`` and return it."""
    declare_torchvision_ops()
    import torch
    from transformers import AutoModelForCausalLM

    config = family_config(shape, **overrides)
    model_type, config.model_type = config.model_type, type(config).model_type
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for _name, tensor in model.state_dict().items():
            # Apart from zeros and ones, so that lost and swapped tensors show.
            if tensor.dim() > 1:
                tensor.mul_(WEIGHT_SCALE)
            tensor.add_(torch.randn_like(tensor) * VECTOR_NOISE)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    file = Path(path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": model_type}))
    return Path(path)


def load_with_transformers(path: str | Path) -> Any:
    """The model as transformers computes it, in float32; by the class of the type as which transformers reads the family."""
    declare_torchvision_ops()
    import torch
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    fields = json.loads((Path(path) / "config.json").read_text())
    model_type = families()[fields["model_type"]].read_as or fields["model_type"]
    # Given explicitly, because from_pretrained converts names of tensors by the type that config.json says.
    config = CONFIG_MAPPING[model_type].from_dict({**fields, "model_type": model_type})
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(path, config=config, dtype=torch.float32)
