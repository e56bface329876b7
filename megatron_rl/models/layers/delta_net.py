"""Linear attention: Megatron's Gated DeltaNet over packs, and its place among a model's layers."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class DeltaNet(GatedDeltaNet):
    """Megatron's Gated DeltaNet as models of this kind are trained: its output norm is not zero-centered, its decay is float32."""

    def __init__(self, config: TransformerConfig, submodules: GatedDeltaNetSubmodules, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        plain = copy.copy(config)
        plain.layernorm_zero_centered_gamma = False
        self.out_norm = build_module(
            submodules.out_norm, config=plain, hidden_size=self.value_head_dim, eps=config.layernorm_epsilon
        )

    def _compute_g_and_beta(self, A_log: Tensor, dt_bias: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        # The servers' A_log is float32 too; rounding its exponential to bfloat16 would change every decay.
        return super()._compute_g_and_beta(A_log.float(), dt_bias, alpha, beta)


def with_linear_attention(
    layers: Sequence[ModuleSpec], is_linear: Sequence[int], config: TransformerConfig, *, on_gpu: bool
) -> list[ModuleSpec]:
    """Specs of ``layers`` with linear attention where ``is_linear`` is 1. ``on_gpu``: with Transformer Engine's layers."""
    backend: Any = LocalSpecProvider()
    if on_gpu:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        backend = TESpecProvider()
    # Transformer Engine's layer includes the norm before it.
    fused = backend.column_parallel_layer_norm_linear()
    attention = ModuleSpec(
        DeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=fused or backend.column_parallel_linear(),
            out_norm=backend.layer_norm(rms_norm=config.normalization == "RMSNorm", for_qk=False),
            out_proj=backend.row_parallel_linear(),
        ),
    )
    specs = []
    for layer, linear in zip(layers, is_linear, strict=True):
        keys = {
            name: key.replace(".linear_qkv.", ".in_proj.")
            for name, key in layer.submodules.sharded_state_dict_keys_map.items()
        }
        submodules = dataclasses.replace(layer.submodules, self_attention=attention, sharded_state_dict_keys_map=keys)
        specs.append(dataclasses.replace(layer, submodules=submodules) if linear else layer)
    return specs
