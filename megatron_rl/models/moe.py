"""Mixture-of-experts settings: what they mean to Megatron, and which of them a model and a machine can have.

Megatron's own auxiliary loss and bias update stay off: the first depends on how an update is cut into micro-batches,
the second counts padding and moves even if the step is skipped. ``routing.py`` has both, without these faults.
"""

from typing import Any

import torch
from transformers import PretrainedConfig

from megatron_rl.config.schema import Dispatcher, LoadBalancing, MoeConfig, RouterDtype, RoutingReplay
from megatron_rl.errors import ModelError
from megatron_rl.models.hf.families import dims, family_of

ROUTER_DTYPES = {RouterDtype.fp32: "fp32", RouterDtype.fp64: "fp64", RouterDtype.model: None}


def moe_kwargs(settings: MoeConfig, hf_config: PretrainedConfig) -> dict[str, Any]:
    """Fields of TransformerConfig that lie over those of the family; none for a dense model."""
    if not dims(hf_config)["experts"]:
        return {}
    return dict(
        moe_router_dtype=ROUTER_DTYPES[settings.router_dtype],
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_bias_update_rate=0.0,
        moe_token_dispatcher_type=settings.dispatcher.value,
        moe_grouped_gemm=settings.grouped_gemm,
    )


def check_moe(settings: MoeConfig, hf_config: PretrainedConfig, *, where: str = "policy.moe") -> None:
    """Raises ModelError for settings that this model or machine cannot follow."""
    num_experts = dims(hf_config)["experts"]
    if not num_experts:
        changed = [
            f"{where}.{name}={getattr(settings, name).value}"
            for name in ("load_balancing", "routing_replay")
            if getattr(settings, name).value != "none"
        ]
        if changed:
            raise ModelError(
                f"{', '.join(changed)}: needs a mixture-of-experts model, but {hf_config.model_type} is dense; "
                "leave it at none"
            )
        return
    # Ids are stored as int16, one up.
    if settings.routing_replay is not RoutingReplay.none and num_experts >= torch.iinfo(torch.int16).max:
        raise ModelError(
            f"{where}.routing_replay: at most {torch.iinfo(torch.int16).max - 1} experts, got {num_experts}"
        )
    if settings.load_balancing is LoadBalancing.bias and not has_expert_bias(hf_config):
        raise ModelError(
            f"{where}.load_balancing=bias: {hf_config.model_type} has no expert bias, so its checkpoints and the "
            "servers could not hold one; use aux_loss or none"
        )
    if settings.dispatcher is Dispatcher.allgather:
        raise ModelError(
            f"{where}.dispatcher=allgather: it needs equally long batches on all ranks, and packs differ in length; "
            "use alltoall"
        )
    if not torch.cuda.is_available():
        if settings.dispatcher is Dispatcher.flex:
            raise ModelError(f"{where}.dispatcher=flex: DeepEP needs GPUs, and none is present; use alltoall")
        if settings.grouped_gemm:
            raise ModelError(f"{where}.grouped_gemm: needs a GPU, and none is present; set it to false")


def has_expert_bias(hf_config: PretrainedConfig) -> bool:
    """The family's routers add a bias to the scores before they choose."""
    return bool(family_of(hf_config).transformer_kwargs(hf_config).get("moe_router_enable_expert_bias"))
