"""Translates a model's config.json and a parallel layout to Megatron's configuration; refuses layouts that do not fit.

The checks of a recipe's models run before any process starts.
"""

import importlib.util
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from transformers import PretrainedConfig

from megatron_rl.config.checks.data_settings import folders_read
from megatron_rl.config.derived import needs_critic
from megatron_rl.config.layout import (
    critic_layout,
    expert_tensor_size,
    experts_problem,
    first_chunk_layers,
    layers_problem,
    megatron_stages,
    unsplit_problem,
)
from megatron_rl.config.schema import Config, Init, Mtp, ParallelConfig, Recompute, RewardModelKind
from megatron_rl.config.schema.commands import RL_COMMANDS
from megatron_rl.errors import ConfigError, ModelError, UserError
from megatron_rl.families.family import family_of
from megatron_rl.families.model_facts import dims, has_linear_attention, split_sizes, takes_images, text_config
from megatron_rl.families.rotary import inverse_frequencies, rope_parameters
from megatron_rl.families.transforms import padded_vocab_size
from megatron_rl.families.vision_encoder import num_deepstack
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.models.hf.tensor_sources import check_mtp_present
from megatron_rl.models.hf.weights import checked_source
from megatron_rl.models.layers.torch_layers import has_transformer_engine
from megatron_rl.system.megatron_core import config_fields


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
    (``calculate_per_token_loss``): the training loop passes the schedule a loss sum and a token count. Raises
    ValueError if the model does not fit the parallel layout.
    """
    check_layout(hf_config, parallel)
    sizes, rope, text = dims(hf_config), rope_parameters(hf_config), text_config(hf_config)
    kwargs = {
        **_architecture(hf_config),
        **_layout(parallel),
        **_kernels(hf_config),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "calculate_per_token_loss": True,
        # Megatron must not initialize parameters, because weights come from a checkpoint or from RandomSource.
        "use_cpu_initialization": True,
        "perform_initialization": False,
        **_recompute(recompute, hf_config, with_grouped_experts=bool(overrides.get("moe_grouped_gemm"))),
        **family_of(hf_config).transformer_kwargs(hf_config),
        **_latent_rope(hf_config, parallel),
        **overrides,
    }
    _check_rope_fusion(hf_config, bool(kwargs["apply_rope_fusion"]))
    if kwargs.get("deterministic_mode") and has_linear_attention(hf_config):
        raise ModelError("megatron.deterministic_mode=true: Megatron's linear attention then takes no packed sequences; remove the field")
    if kwargs["bias_activation_fusion"] and kwargs["add_bias_linear"] and kwargs.get("activation_func_clamp_value") is not None:
        raise ModelError(
            "megatron.bias_activation_fusion=true: Megatron's fused kernel clamps the activations of this model before it adds the "
            "bias; remove the field"
        )
    # By name in the families, which import no Megatron.
    kwargs["activation_func"] = {"quick_gelu": quick_gelu}.get(kwargs["activation_func"], kwargs["activation_func"])
    model_kwargs = dict(
        vocab_size=padded_vocab_size(sizes["vocab"], parallel.tensor_parallel_size),
        max_sequence_length=text.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
        rotary_percent=rope.get("partial_rotary_factor", 1.0),
        share_embeddings_and_output_weights=bool(hf_config.tie_word_embeddings),
    )
    return kwargs, model_kwargs


def _architecture(hf_config: PretrainedConfig) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig that all families share."""
    sizes, text = dims(hf_config), text_config(hf_config)
    return dict(
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
    )


def _layout(parallel: ParallelConfig) -> dict[str, Any]:
    is_interleaved = parallel.virtual_pipeline_size > 1
    return dict(
        tensor_model_parallel_size=parallel.tensor_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_size if is_interleaved else None,
        sequence_parallel=parallel.sequence_parallel and parallel.tensor_parallel_size > 1,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_parallel_size,
        expert_tensor_parallel_size=expert_tensor_size(parallel),
        pipeline_model_parallel_layout=megatron_stages(parallel),
        # Packs differ in length (parallel/pipeline_shapes.py); Megatron then requires this dispatcher, even for dense models.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Off with gloo, because freeing a sent output early corrupts data in transit.
        deallocate_pipeline_outputs=torch.cuda.is_available(),
        # Not batched if interleaved: with two stages, messages to the next and to the previous stage could be confused.
        overlap_p2p_comm=is_interleaved,
        batch_p2p_comm=not is_interleaved,
        # Off: a synchronization after every message that only PyTorch 1 needed.
        batch_p2p_sync=False,
    )


def _kernels(hf_config: PretrainedConfig) -> dict[str, Any]:
    on_gpu, with_te = torch.cuda.is_available(), has_transformer_engine()
    return config_fields() | dict(
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        # Only without a factor on cosine and sine, which Megatron's fused kernel silently ignores for packs.
        apply_rope_fusion=with_te and inverse_frequencies(hf_config)[1] == 1.0,
        # For Megatron's own linear layers, with a kernel of Apex; Transformer Engine has its own (training/ddp.py).
        gradient_accumulation_fusion=on_gpu
        and not with_te
        and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
    )


def _recompute(recompute: Recompute, hf_config: PretrainedConfig, *, with_grouped_experts: bool) -> dict[str, Any]:
    """Fields that select the activations recomputed in backward.

    Core attention is not recomputed: flash attention stores no scores, so recomputing would cost time and save nothing.
    """
    if recompute is Recompute.none:
        return {}
    if recompute is Recompute.full:
        return dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    modules = ["mlp"]
    modules += ["mla_up_proj"] if family_of(hf_config).is_latent else []
    # Megatron 0.16.1 fails with an undefined name if it recomputes a norm without Transformer Engine.
    modules += ["layernorm"] if has_transformer_engine() else []
    modules += ["moe_act"] if with_grouped_experts else []
    return dict(recompute_granularity="selective", recompute_modules=modules)


def _check_rope_fusion(hf_config: PretrainedConfig, is_fused: bool) -> None:
    """Raise ModelError if a recipe fuses rotary embeddings although the fused kernel would compute this model wrongly."""
    factor = inverse_frequencies(hf_config)[1]
    if is_fused and factor != 1.0:
        raise ModelError(
            f"megatron.apply_rope_fusion=true: the model's rotary embedding has an attention factor of {factor:.6g} (yarn), "
            "which Megatron's fused kernel ignores for packed sequences; remove the field"
        )


def _latent_rope(hf_config: PretrainedConfig, parallel: ParallelConfig) -> dict[str, Any]:
    """Additional fields of latent attention.

    "yarn" makes attention read a factor from its embedding, which models/layers/rope.py installs. The last two
    fields enter the softmax scale.
    """
    if not family_of(hf_config).is_latent:
        return {}
    rope, parts = rope_parameters(hf_config), 2 * parallel.context_parallel_size
    return dict(
        rope_type="yarn",
        # Positions of an embedding that is replaced; Megatron splits them evenly over the context-parallel ranks.
        original_max_position_embeddings=math.ceil(4096 / parts) * parts,
        rotary_base=rope["rope_theta"],
        rotary_scaling_factor=rope.get("factor") or 1.0,
        mscale_all_dim=rope.get("mscale_all_dim") or 0.0 if rope["rope_type"] != "default" else 0.0,
    )


def transformer_class(hf_config: PretrainedConfig) -> type[TransformerConfig]:
    """Megatron's configuration class for the keyword arguments of ``megatron_config``."""
    return MLATransformerConfig if family_of(hf_config).is_latent else TransformerConfig


def check_layout(hf_config: PretrainedConfig, parallel: ParallelConfig) -> None:
    """Raise ModelError, with the keys, if the model cannot be split according to ``parallel``."""
    text, tp = text_config(hf_config), parallel.tensor_parallel_size
    sizes = dims(hf_config)
    for name, size in split_sizes(hf_config).items():
        if size % tp != 0:
            raise ModelError(f"the model's {name} {size} does not divide by parallel.tensor_parallel_size {tp}")
    layers = layers_problem(parallel, text.num_hidden_layers)
    experts = experts_problem(parallel, sizes["experts"], sizes["expert_ffn"])
    for problem in (layers, experts, unsplit_problem(parallel, family_of(hf_config).unsplit)):
        if problem:
            raise ModelError(f"the model's {problem}")
    if takes_images(hf_config):
        first, needed = first_chunk_layers(parallel, text.num_hidden_layers), num_deepstack(hf_config.vision_config)
        if first < needed:
            raise ModelError(
                f"the model's first {needed} layers take image features (deepstack_visual_indexes), but the first "
                f"pipeline stage has {first}; give it more with parallel.pipeline_layers, or lower "
                "parallel.pipeline_parallel_size or parallel.virtual_pipeline_size"
            )
    is_linear = has_linear_attention(hf_config)
    if (family_of(hf_config).is_latent or is_linear) and tp > 1 and not parallel.sequence_parallel:
        # The gradients of a latent's projections, and of the norm of a linear layer's output, cover a rank's own heads only.
        kind = "linear" if is_linear else "latent"
        raise ModelError(f"{kind} attention with tensor parallelism needs parallel.sequence_parallel=true")
    cp = parallel.context_parallel_size
    if is_linear and sizes["linear_key_heads"] % (tp * cp) != 0:
        raise ModelError(
            f"the model's linear_num_key_heads {sizes['linear_key_heads']} does not divide by parallel.tensor_parallel_size {tp} "
            f"* parallel.context_parallel_size {cp}"
        )


def needs_sequence_parallelism(hf_config: PretrainedConfig) -> bool:
    """Return whether Megatron splits this model over tensor-parallel ranks only with sequence parallelism."""
    return bool(dims(hf_config)["experts"]) or family_of(hf_config).is_latent or has_linear_attention(hf_config)


def check_models(config: Config, command: str) -> None:
    """Raise ConfigError, with the key, for a folder whose model is not supported or whose weights do not fit.

    Reads config.json and the headers of the weights.
    """
    value_models = {"critic.path", "reward.process.path"}
    if command == "reward-train" and config.reward_train.kind is not RewardModelKind.pairwise:
        value_models.add("policy.path")
    for key, folder in folders_read(config, command).items():
        has_weights = key != "policy.path" or config.policy.init is Init.checkpoint
        try:
            hf_config = load_hf_config(folder)
            check_layout(hf_config, critic_layout(config) if key in value_models - {"policy.path"} else config.parallel)
            if key == "policy.path" and command in RL_COMMANDS and needs_critic(config) and not config.critic.path:
                check_layout(hf_config, critic_layout(config))
            if key == "policy.path" and config.policy.mtp is Mtp.keep:
                check_mtp_present(hf_config, folder, remedy="set policy.mtp=drop")
            if has_weights:
                checked_source(hf_config, folder, "critic" if key in value_models else "policy")
        except (UserError, OSError) as error:
            raise ConfigError(f"{key}: {error}") from error
