"""Fields of Megatron's TransformerConfig that a recipe sets directly, by ``policy.megatron`` and ``critic.megatron``.

A field is passed through unless this trainer sets it by another key or relies on its value. Names and types are
checked against the dataclass of the installed Megatron.

8-bit floating point (``policy.fp8``) is computed by Transformer Engine. Only the inputs of matrix products are
cast, with one scale per tensor. Parameters stay in bfloat16 with float32 main weights, so checkpoints, exports and
the optimizer are the same as in a bfloat16 run.
"""

import dataclasses
import difflib
import enum
import importlib.util
import types
import typing
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from megatron_rl.config.schema import Fp8, MoeConfig
from megatron_rl.errors import ModelError

ADJUSTABLE = (
    "apply_rope_fusion batch_p2p_sync bias_activation_fusion bias_dropout_fusion gradient_accumulation_fusion "
    "masked_softmax_fusion moe_permute_fusion moe_router_fusion moe_shared_expert_overlap persist_layer_norm"
).split()
"""Fields for which this trainer has its own default."""
_FP8_RECIPE = "tensorwise"
"""Scales come from the current tensor, because a history of scales would mix inference with updates, and short
packs with long packs."""
_FIRST_FP8_CAPABILITY = (8, 9)

_MODEL = "config.json of the model's folder sets it"
_SAMPLING = "the servers would compute a different model than the trainer"
_WIRED = "this trainer's passes over packs rely on the value"
_SET_BY: dict[str, str] = {
    "num_layers hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size normalization "
    "layernorm_epsilon layernorm_zero_centered_gamma gated_linear_unit activation_func glu_linear_offset "
    "activation_func_clamp_value add_bias_linear add_qkv_bias qk_layernorm qk_l2_norm attention_output_gate "
    "apply_residual_connection_post_layernorm multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim "
    "qk_pos_emb_head_dim v_head_dim rope_type rotary_base rotary_percent rotary_scaling_factor rotary_interleaved "
    "original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim mrope_section no_rope_freq "
    "softmax_scale softmax_type window_size window_attn_skip_freq experimental_attention_variant "
    "linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
    "linear_num_value_heads is_hybrid_model num_moe_experts moe_layer_freq moe_ffn_hidden_size moe_router_topk "
    "moe_router_topk_limited_devices moe_shared_expert_intermediate_size moe_shared_expert_gate "
    "moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor "
    "moe_router_score_function moe_router_enable_expert_bias moe_apply_probs_on_input moe_latent_size use_mup "
    "mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim mup_attn_scale_power "
    "dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_kernel_backend dsa_indexer_rope_interleaved "
    "dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 "
    "moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size": _MODEL,
    "mtp_num_layers mtp_loss_scaling_factor mtp_standalone mtp_use_repeated_layer mtp_detach_heads "
    "mtp_hybrid_override_pattern mtp_grad_scale_func": "multi-token-prediction layers are never built",
    "attention_dropout hidden_dropout moe_expert_capacity_factor moe_input_jitter_eps moe_token_dropping "
    "moe_pad_expert_input_to_capacity moe_router_force_load_balancing moe_router_force_biased "
    "moe_expert_rank_capacity_factor": _SAMPLING,
    "tensor_model_parallel_size tensor_parallel_num_weight_shards gtp_weight_remat_size": "parallel.tensor_parallel_size sets it",
    "pipeline_model_parallel_size": "parallel.pipeline_parallel_size sets it",
    "virtual_pipeline_model_parallel_size": "parallel.virtual_pipeline_size sets it",
    "pipeline_model_parallel_layout num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage "
    "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split": "parallel.pipeline_layers sets it",
    "sequence_parallel": "parallel.sequence_parallel sets it",
    "context_parallel_size hierarchical_context_parallel_sizes hybrid_context_parallel "
    "max_seqlen_per_dp_cp_rank": "parallel.context_parallel_size sets it",
    "expert_model_parallel_size moe_extended_tp": "parallel.expert_parallel_size sets it",
    "expert_tensor_parallel_size expert_tensor_parallel_num_weight_shards "
    "expert_gtp_weight_remat_size": "parallel.expert_tensor_parallel_size sets it",
    "fp16 bf16 params_dtype pipeline_dtype autocast_dtype enable_autocast": "policy.dtype and critic.dtype set it",
    "recompute_granularity recompute_method recompute_num_layers recompute_modules "
    "moe_layer_recompute": "policy.recompute and critic.recompute set it",
    "fp8 fp8_recipe fp8_param fp4 fp4_recipe fp4_param": "policy.fp8 sets it",
    "moe_router_dtype": "policy.moe.router_dtype sets it",
    "moe_router_load_balancing_type moe_router_quantile_balancing_ema": "policy.moe.load_balancing sets it",
    "moe_aux_loss_coeff moe_z_loss_coeff": "policy.moe.aux_loss_coef sets it",
    "moe_router_bias_update_rate": "policy.moe.bias_update_rate sets it",
    "moe_enable_routing_replay": "policy.moe.routing_replay sets it",
    "moe_token_dispatcher_type moe_enable_deepep": "policy.moe.dispatcher sets it",
    "moe_grouped_gemm moe_use_legacy_grouped_gemm": "policy.moe.grouped_gemm sets it",
    "calculate_per_token_loss variable_seq_lengths use_cpu_initialization perform_initialization "
    "init_model_with_meta_device deallocate_pipeline_outputs overlap_p2p_comm batch_p2p_comm use_ring_exchange_p2p "
    "cuda_graph_scope cuda_graph_impl enable_cuda_graph external_cuda_graph flash_decode test_mode "
    "heterogeneous_block_specs use_inference_optimized_layers transformer_impl "
    "overlap_moe_expert_parallel_comm fine_grained_activation_offloading cuda_graph_modules inference_cuda_graph_scope "
    "moe_grad_scale_func moe_paged_stash mlp_chunks_for_training": _WIRED,
    "use_transformer_engine_op_fuser use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert "
    "moe_single_grouped_weight moe_single_grouped_bias fused_residual_rmsnorm": "weights would have other names or places",
    "tp_comm_overlap": "Transformer Engine's buffers have one size, and packs differ in length",
}
REFUSED = {name: reason for names, reason in _SET_BY.items() for name in names.split()}
"""Maps each refused field to the reason."""


@dataclasses.dataclass(frozen=True)
class MegatronSettings:
    """Settings of a recipe that change how any model is computed."""

    moe: MoeConfig = dataclasses.field(default_factory=MoeConfig)
    fp8: Fp8 = Fp8.none
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of TransformerConfig from ``policy.megatron`` or ``critic.megatron``."""


PLAIN = MegatronSettings()


def checked_fields(fields: Mapping[str, Any], *, key: str = "megatron") -> dict[str, Any]:
    """``fields`` with values converted for TransformerConfig. Raises ModelError with all problems.

    ``key``: the fields' section of the configuration, for messages.
    """
    hints = typing.get_type_hints(TransformerConfig)
    known = [field.name for field in dataclasses.fields(TransformerConfig) if not field.name.startswith("_")]
    values, problems = {}, []
    for name, value in fields.items():
        hint = hints.get(name)
        if name in REFUSED:
            problems.append(f"{key}.{name}: cannot be set here: {REFUSED[name]}")
        elif name not in known:
            near = difflib.get_close_matches(name, [other for other in known if other not in REFUSED], n=3)
            guess = f"; did you mean {' or '.join(near)}?" if near else ""
            problems.append(f"{key}.{name}: Megatron's TransformerConfig has no such field{guess}")
        elif isinstance(hint, type) and issubclass(hint, enum.Enum) and value in hint.__members__:
            values[name] = hint[value]
        elif not _fits(value, hint):
            problems.append(f"{key}.{name}: expected {_described(hint)}, got {value!r}")
        else:
            values[name] = value
    if problems:
        raise ModelError("\n".join(problems))
    return values


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint in (bool, int, str, list, type(None)):
        # An exact type, because True is an int in Python but a mistake in a configuration.
        return type(value) is hint
    return False


def _described(hint: Any) -> str:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return f"one of {', '.join(hint.__members__)}"
    if typing.get_origin(hint) is None and isinstance(hint, type):
        return hint.__name__
    return str(hint).replace("typing.", "")


def fp8_kwargs(fp8: Fp8) -> dict[str, Any]:
    """Fields of TransformerConfig for ``fp8``; empty without."""
    if fp8 is Fp8.none:
        return {}
    return dict(fp8=fp8.value, fp8_recipe=_FP8_RECIPE, fp8_param=False)


def check_fp8(fp8: Fp8, dtype: torch.dtype) -> None:
    """Raise ModelError, with the reason, if parameters of ``dtype`` or this machine do not support ``fp8``."""
    if fp8 is Fp8.none:
        return
    key = f"policy.fp8={fp8.value}"
    if dtype is not torch.bfloat16:
        raise ModelError(
            f"{key}: needs parameters in bfloat16, got {str(dtype).removeprefix('torch.')}; set dtype=bfloat16"
        )
    if not torch.cuda.is_available():
        raise ModelError(f"{key}: needs a GPU, and none is present; set none")
    if importlib.util.find_spec("transformer_engine") is None:
        raise ModelError(f"{key}: needs Transformer Engine, which is not installed; install it, or set none")
    capability = torch.cuda.get_device_capability()
    if capability < _FIRST_FP8_CAPABILITY:
        raise ModelError(
            f"{key}: {torch.cuda.get_device_name()} (compute capability {capability[0]}.{capability[1]}) has no 8-bit "
            f"products, which need at least {_FIRST_FP8_CAPABILITY[0]}.{_FIRST_FP8_CAPABILITY[1]}; set none"
        )
