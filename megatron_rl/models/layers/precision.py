"""8-bit floating point through Transformer Engine: checks model and machine, and translates the setting for Megatron.

Only the inputs of matrix products are cast, with one scale per tensor. Parameters stay in bfloat16 with float32 main
weights, so checkpoints, exports and the optimizer are the same as in a bfloat16 run.
"""

import importlib.util
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from megatron_rl.config.schema import Fp8
from megatron_rl.errors import ModelError

_FP8_RECIPE = "tensorwise"
"""Scales come from the current tensor, because a history of scales would mix inference with updates, and short packs with
long packs."""
_FP8_ALIGNMENT = 16
"""The number of rows of Transformer Engine's 8-bit products must be a multiple of this."""
_FIRST_FP8_CAPABILITY = (8, 9)


def fp8_kwargs(fp8: Fp8) -> dict[str, Any]:
    """Fields of TransformerConfig for ``fp8``; empty without."""
    if fp8 is Fp8.none:
        return {}
    return dict(fp8=fp8.value, fp8_recipe=_FP8_RECIPE, fp8_param=False)


def check_fp8(fp8: Fp8, dtype: torch.dtype, *, where: str = "policy.fp8") -> None:
    """Raise ModelError, with the reason, if parameters of ``dtype`` or this machine do not support ``fp8``."""
    if fp8 is Fp8.none:
        return
    key = f"{where}={fp8.value}"
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


def pack_alignment(config: TransformerConfig) -> int:
    """Number of tokens of which a pack's padded length must be a multiple, for the layers of each rank."""
    tp_size = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return tp_size * (_FP8_ALIGNMENT if config.fp8 else 1)
