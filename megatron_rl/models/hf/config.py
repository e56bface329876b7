"""From a Hugging Face config.json to Megatron's configuration, refusing what would silently compute something else."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, PretrainedConfig

from megatron_rl.config.layout import expert_tensor_size, experts_problem, layers_problem, megatron_stages
from megatron_rl.config.schema import ParallelConfig, Recompute
from megatron_rl.errors import ModelError
from megatron_rl.models.hf.families import FAMILIES, dims, family_of
from megatron_rl.models.hf.transforms import padded_vocab_size
from megatron_rl.rollout.cpu_platform import declare_torchvision_ops

ROPE_TYPES = ("default", "llama3")
RECOMPUTE_KWARGS: dict[Recompute, dict[str, Any]] = {
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
    try:
        model_type = json.loads(file.read_text()).get("model_type")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{file} is not a JSON object: {error}") from error
    if model_type not in FAMILIES:
        supported = ", ".join(sorted(FAMILIES))
        raise ModelError(f"{file}: model_type {model_type!r} is not supported; supported: {supported}")
    # Configurations of some families import torchvision, for models that this project never builds.
    declare_torchvision_ops()
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    _check_features(config, file)
    return config


def _check_features(config: PretrainedConfig, file: Path) -> None:
    expected: dict[str, Any] = {"hidden_act": "silu", "attention_dropout": 0.0, **family_of(config).forbidden}
    for name, value in expected.items():
        found = getattr(config, name, value)
        if found != value and not (not found and not value):
            raise ModelError(f"{file}: {name} = {found!r} is not supported for {config.model_type}, only {value!r}")
    rope = rope_parameters(config)
    if rope["rope_type"] not in ROPE_TYPES:
        supported = ", ".join(ROPE_TYPES)
        raise ModelError(f"{file}: rope_type {rope['rope_type']!r} is not supported; supported: {supported}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{file}: partial_rotary_factor {rope['partial_rotary_factor']} is not supported, only 1.0")
    sizes = dims(config)
    if sizes["heads"] % sizes["groups"] != 0:
        raise ModelError(
            f"{file}: num_attention_heads {sizes['heads']} does not divide by num_key_value_heads {sizes['groups']}"
        )


def rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """transformers 5 keeps everything in ``rope_parameters``; older versions in two fields."""
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
    sizes, tp = dims(hf_config), parallel.tensor_parallel_size
    on_gpu = torch.cuda.is_available()
    kwargs: dict[str, Any] = dict(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=sizes["hidden"],
        num_attention_heads=sizes["heads"],
        num_query_groups=sizes["groups"],
        kv_channels=sizes["head_dim"],
        ffn_hidden_size=sizes["ffn"],
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
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
        **RECOMPUTE_KWARGS[recompute],
    )
    kwargs.update(family_of(hf_config).transformer_kwargs(hf_config))
    kwargs.update(overrides)
    model_kwargs = dict(
        vocab_size=padded_vocab_size(sizes["vocab"], tp),
        max_sequence_length=hf_config.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=rope_parameters(hf_config)["rope_theta"],
        share_embeddings_and_output_weights=bool(hf_config.tie_word_embeddings),
    )
    return kwargs, model_kwargs


def check_layout(hf_config: PretrainedConfig, parallel: ParallelConfig) -> None:
    """Raises ValueError, naming the keys, where the model cannot be split as ``parallel`` says."""
    sizes, tp = dims(hf_config), parallel.tensor_parallel_size
    split = {"num_key_value_heads": sizes["groups"], "num_attention_heads": sizes["heads"]}
    if not sizes["experts"]:
        split["intermediate_size"] = sizes["ffn"]
    for name, size in split.items():
        if size % tp != 0:
            raise ModelError(f"the model's {name} {size} does not divide by parallel.tensor_parallel_size {tp}")
    layers = layers_problem(parallel, hf_config.num_hidden_layers)
    experts = experts_problem(parallel, sizes["experts"], sizes["expert_ffn"])
    for problem in (layers, experts):
        if problem:
            raise ModelError(f"the model's {problem}")


def scaled_inverse_frequencies(inverse_frequencies: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Llama 3's rotary scaling of ``inverse_frequencies`` [head_dim / 2].

    Wavelengths beyond the original context are stretched by ``factor``, short ones kept, those between interpolated
    (the rule of ``rope_type: llama3``). Megatron's own version fixes all parameters but the factor.
    """
    context, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelength = 2 * math.pi / inverse_frequencies
    smooth = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inverse_frequencies / factor + smooth * inverse_frequencies
