"""From a Hugging Face config.json to Megatron's configuration, refusing what would silently compute something else."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rl.config.layout import (
    expert_tensor_size,
    experts_problem,
    first_chunk_layers,
    layers_problem,
    megatron_stages,
)
from megatron_rl.config.schema import ParallelConfig, Recompute
from megatron_rl.cpu.torchvision import declare_torchvision_ops
from megatron_rl.errors import ModelError
from megatron_rl.families.facts import dims, read_json_object, router_groups, sees, text_config, uses_only_experts
from megatron_rl.families.family import families, family_of
from megatron_rl.families.transforms import padded_vocab_size
from megatron_rl.families.vision_encoder import num_deepstack

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose frequencies do not depend on the length of the sequence at hand."""
_RECOMPUTE_KWARGS: dict[Recompute, dict[str, Any]] = {
    Recompute.none: {},
    Recompute.selective: dict(recompute_granularity="selective", recompute_modules=["core_attn"]),
    Recompute.full: dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
}


def load_hf_config(path: str | Path) -> PretrainedConfig:
    """Read and check ``path``/config.json.

    Errors: FileNotFoundError where folder or file is missing, ModelError for malformed JSON, a model family that is not
    supported, or a feature of it that is not.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"model folder {folder} does not exist; a path is a local folder, not a hub repository")
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no config.json; a Hugging Face model folder is expected")
    model_type = read_json_object(file).get("model_type")
    if model_type not in families():
        raise ModelError(f"{file}: model_type {model_type!r} is not supported; supported: {', '.join(families())}")
    # Configurations of some families import torchvision, for models that this project never builds.
    declare_torchvision_ops()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (AttributeError, KeyError, TypeError, ValueError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{file} is not a configuration that transformers takes: {reason}") from error
    _check_features(config, file)
    return config


def _check_features(config: PretrainedConfig, file: Path) -> None:
    family, sizes, rope = family_of(config), dims(config), rope_parameters(config)
    expected: dict[str, Any] = {"hidden_act": "silu", "attention_dropout": 0.0, **family.forbidden}
    for name, value in expected.items():
        found = getattr(text_config(config), name, value)
        if found != value and not (not found and not value):
            raise ModelError(f"{file}: {name} = {found!r} is not supported for {config.model_type}, only {value!r}")
    if getattr(config, "quantization_config", None):
        raise ModelError(
            f"{file}: quantization_config: quantised weights are not read; give a copy in bfloat16 or float32, "
            "without quantization_config"
        )
    if rope["rope_type"] not in _ROPE_TYPES:
        supported = ", ".join(_ROPE_TYPES)
        raise ModelError(f"{file}: rope_type {rope['rope_type']!r} is not supported; supported: {supported}")
    partial = rope.get("partial_rotary_factor", 1.0)
    if partial != 1.0 and not family.takes_partial_rotary:
        raise ModelError(
            f"{file}: partial_rotary_factor {partial} is not supported for {config.model_type}, only 1.0: "
            "transformers rotates whole heads in this family"
        )
    if sizes["heads"] % sizes["groups"] != 0:
        raise ModelError(
            f"{file}: num_attention_heads {sizes['heads']} does not divide by num_key_value_heads {sizes['groups']}"
        )
    if family.is_latent and sizes["heads"] != sizes["groups"]:
        raise ModelError(
            f"{file}: num_key_value_heads {sizes['groups']} is not num_attention_heads {sizes['heads']}; with latent "
            "attention every head has a key of its own"
        )
    if "num_moe_experts" in family.transformer_kwargs(config) and not sizes["experts"]:
        raise ModelError(
            f"{file}: no layer of this {config.model_type} is a mixture of experts; Megatron Core needs one (see "
            "first_k_dense_replace, decoder_sparse_step, mlp_only_layers and the number of experts)"
        )
    if sizes["experts"]:
        _check_router(config, sizes["experts"], file)
    if sees(config):
        _check_vision(config, file)
    try:
        frequencies, _ = inverse_frequencies(config)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ModelError(f"{file}: rope_parameters {rope} are not complete: {error!r}") from error
    rotated = text_config(config).qk_rope_head_dim if family.is_latent else int(sizes["head_dim"] * partial)
    if 2 * len(frequencies) != rotated or not frequencies.isfinite().all():
        raise ModelError(
            f"{file}: rope_parameters {rope} give {len(frequencies)} frequencies, finite or not, for {rotated} rotary "
            "dimensions of a head; expected a finite one for every two (see factor, head_dim, qk_rope_head_dim)"
        )


def _check_vision(config: PretrainedConfig, file: Path) -> None:
    text, vision = config.text_config, config.vision_config
    if vision.out_hidden_size != text.hidden_size:
        raise ModelError(
            f"{file}: vision_config.out_hidden_size {vision.out_hidden_size} is not text_config.hidden_size "
            f"{text.hidden_size}"
        )
    for name in ("image_token_id", "video_token_id"):
        if not 0 <= getattr(config, name) < text.vocab_size:
            raise ModelError(
                f"{file}: {name} {getattr(config, name)} is not in the vocabulary of {text.vocab_size} tokens"
            )
    if num_deepstack(vision) > text.num_hidden_layers:
        raise ModelError(
            f"{file}: vision_config.deepstack_visual_indexes names {num_deepstack(vision)} layers, more than "
            f"text_config.num_hidden_layers {text.num_hidden_layers}"
        )
    section = rope_parameters(config).get("mrope_section")
    head_dim = dims(config)["head_dim"]
    if not isinstance(section, list) or len(section) != 3 or 2 * sum(section) != head_dim:
        raise ModelError(
            f"{file}: rope_parameters.mrope_section {section} is not three numbers that add up to {head_dim // 2}, half "
            "of a head"
        )


def _check_router(config: PretrainedConfig, experts: int, file: Path) -> None:
    text = text_config(config)
    chosen = text.num_experts_per_tok
    if not 0 < chosen <= experts:
        raise ModelError(f"{file}: num_experts_per_tok {chosen} is not in [1, {experts}], the number of experts")
    if chosen == 1 and getattr(text, "norm_topk_prob", True):
        raise ModelError(
            f"{file}: num_experts_per_tok 1 with normalised probabilities gives every expert the weight 1, which "
            "Megatron Core does not compute; expected at least 2, or norm_topk_prob false"
        )
    groups, chosen_groups = router_groups(config)
    if not 0 < chosen_groups <= groups or experts % groups:
        raise ModelError(
            f"{file}: n_group {groups} and topk_group {chosen_groups} do not fit {experts} experts; expected groups of "
            "equal size and 1 <= topk_group <= n_group"
        )
    if chosen_groups < groups and chosen // chosen_groups != 2:
        raise ModelError(
            f"{file}: num_experts_per_tok {chosen} with topk_group {chosen_groups}: Megatron Core scores a group by its "
            f"best {chosen // chosen_groups} experts, transformers by its best 2; only two experts a group are supported"
        )


def rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """transformers 5 keeps everything in ``rope_parameters``; older versions in two fields."""
    config = text_config(config)
    rope = getattr(config, "rope_parameters", None)
    if rope is None:
        rope = {"rope_theta": config.rope_theta, **(getattr(config, "rope_scaling", None) or {})}
    return {"rope_type": "default", **rope}


def megatron_config(
    hf_config: PretrainedConfig,
    parallel: ParallelConfig,
    *,
    dtype: torch.dtype,
    recompute: Recompute = Recompute.none,
    **overrides: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments of Megatron's TransformerConfig and of GPTModel (without layer spec and stage flags).

    ``overrides`` replace fields of TransformerConfig. Gradients are sums over tokens
    (``calculate_per_token_loss``): the training loop hands the schedule a loss sum and a token count. Raises ValueError
    where the model does not fit the parallel layout.
    """
    check_layout(hf_config, parallel)
    sizes, tp, text = dims(hf_config), parallel.tensor_parallel_size, text_config(hf_config)
    on_gpu = torch.cuda.is_available()
    kwargs: dict[str, Any] = dict(
        num_layers=text.num_hidden_layers,
        hidden_size=sizes["hidden"],
        num_attention_heads=sizes["heads"],
        num_query_groups=sizes["groups"],
        kv_channels=sizes["head_dim"],
        ffn_hidden_size=sizes["ffn"],
        normalization="RMSNorm",
        layernorm_epsilon=text.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=parallel.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=(
            parallel.virtual_pipeline_size if parallel.virtual_pipeline_size > 1 else None
        ),
        sequence_parallel=parallel.sequence_parallel and tp > 1,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_parallel_size,
        expert_tensor_parallel_size=expert_tensor_size(parallel),
        pipeline_model_parallel_layout=megatron_stages(parallel),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Packs differ in length, and Megatron asks for this dispatcher with it, for dense models too.
        variable_seq_lengths=True,
        cuda_graph_scope=[],
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        # Weights come from a checkpoint or from RandomSource, so Megatron leaves memory as it finds it.
        use_cpu_initialization=True,
        perform_initialization=False,
        # With gloo, freeing a sent output early corrupts what is still on its way.
        deallocate_pipeline_outputs=on_gpu,
        # Batched messages cannot be told apart where two stages are each other's neighbours on both sides.
        overlap_p2p_comm=parallel.virtual_pipeline_size > 1,
        batch_p2p_comm=parallel.virtual_pipeline_size == 1,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=on_gpu and importlib.util.find_spec("transformer_engine") is not None,
        gradient_accumulation_fusion=on_gpu and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        **_RECOMPUTE_KWARGS[recompute],
    )
    kwargs.update(family_of(hf_config).transformer_kwargs(hf_config))
    rope = rope_parameters(hf_config)
    if family_of(hf_config).is_latent:
        # "yarn" makes attention ask its embedding for a factor; models/rope.py installs the embedding itself. The two
        # numbers are those of the softmax scale.
        kwargs.update(
            rope_type="yarn",
            rotary_base=rope["rope_theta"],
            rotary_scaling_factor=rope.get("factor") or 1.0,
            mscale_all_dim=rope.get("mscale_all_dim") or 0.0 if rope["rope_type"] != "default" else 0.0,
        )
    kwargs.update(overrides)
    model_kwargs = dict(
        vocab_size=padded_vocab_size(sizes["vocab"], tp),
        max_sequence_length=text.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
        rotary_percent=rope.get("partial_rotary_factor", 1.0),
        share_embeddings_and_output_weights=bool(hf_config.tie_word_embeddings),
    )
    return kwargs, model_kwargs


def transformer_class(hf_config: PretrainedConfig) -> type[TransformerConfig]:
    """Which of Megatron's configurations takes the keyword arguments of ``megatron_config``."""
    return MLATransformerConfig if family_of(hf_config).is_latent else TransformerConfig


def check_layout(hf_config: PretrainedConfig, parallel: ParallelConfig) -> None:
    """Raises ValueError, naming the keys, where the model cannot be split as ``parallel`` says."""
    sizes, tp = dims(hf_config), parallel.tensor_parallel_size
    text = text_config(hf_config)
    split = {"num_key_value_heads": sizes["groups"], "num_attention_heads": sizes["heads"]}
    if not uses_only_experts(hf_config):
        split["intermediate_size"] = sizes["ffn"]
    for name, size in split.items():
        if size % tp != 0:
            raise ModelError(f"the model's {name} {size} does not divide by parallel.tensor_parallel_size {tp}")
    layers = layers_problem(parallel, text.num_hidden_layers)
    experts = experts_problem(parallel, sizes["experts"], sizes["expert_ffn"])
    for problem in (layers, experts):
        if problem:
            raise ModelError(f"the model's {problem}")
    if sees(hf_config):
        first, needed = first_chunk_layers(parallel, text.num_hidden_layers), num_deepstack(hf_config.vision_config)
        if first < needed:
            raise ModelError(
                f"the model's first {needed} layers take image features (deepstack_visual_indexes), but the first "
                f"pipeline stage holds {first}; give it more with parallel.pipeline_layers, or lower "
                "parallel.pipeline_parallel_size or parallel.virtual_pipeline_size"
            )
    if family_of(hf_config).is_latent and tp > 1 and not parallel.sequence_parallel:
        raise ModelError("latent attention with tensor parallelism needs parallel.sequence_parallel=true")


def needs_sequence_parallelism(hf_config: PretrainedConfig) -> bool:
    """Whether Megatron splits this model over tensor-parallel ranks with sequence parallelism only."""
    return bool(dims(hf_config)["experts"]) or family_of(hf_config).is_latent


def inverse_frequencies(config: PretrainedConfig) -> tuple[torch.Tensor, float]:
    """([rotated dimensions / 2] float32, the factor on cosine and sine) of the rotary embedding, as transformers has it."""
    rope = rope_parameters(config)
    # Real numbers also where a model is built on the meta device.
    with torch.device("cpu"):
        if rope["rope_type"] == "default":
            head = text_config(config).qk_rope_head_dim if family_of(config).is_latent else dims(config)["head_dim"]
            size = int(head * rope.get("partial_rotary_factor", 1.0))
            return 1.0 / (rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)), 1.0
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](text_config(config), torch.device("cpu"))
        return frequencies, float(factor)
