"""SGLang's adapters (``--lora-backend torch_native``) on a CPU.

SGLang pins their memory unconditionally, which needs an accelerator. Its products depend on the number of rows in the
batch, in the last bits; here small products get at least ``MIN_ROWS``, as in ``sglang_layers.py``, so that a token's result
depends on nothing else in the batch. ``tests/unit/cpu/test_sglang_lora.py`` fails when SGLang's functions have moved.
"""

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_rl.cpu.megatron import FACTORIES, ModuleCopy, on_cpu

MODULES = ("layers", "lora", "backend.torch_backend")
"""Modules of ``sglang.srt.lora`` that pin memory on the way of ``torch_native``."""


def install(linear: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Make the modules' factories and ``Tensor.pin_memory`` return plain memory, and adapters multiply by ``linear``."""
    plain = ModuleCopy(torch, {name: on_cpu(getattr(torch, name)) for name in FACTORIES})
    for name in MODULES:
        vars(importlib.import_module(f"sglang.srt.lora.{name}"))["torch"] = plain
    torch.Tensor.pin_memory = _unpinned  # type: ignore[method-assign, assignment]
    backend = vars(importlib.import_module(f"sglang.srt.lora.{MODULES[-1]}"))
    backend["sgemm_lora_a_fwd"] = down_projection(linear, backend["sgemm_lora_a_fwd"])
    backend["sgemm_lora_b_fwd"] = up_projection(linear, backend["sgemm_lora_b_fwd"])


def _unpinned(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor


def down_projection(linear: Callable[[Tensor, Tensor], Tensor], stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replacement of SGLang's product by A, which ``stock`` computes for batches with several adapters."""

    def down(inputs: Tensor, weights: Tensor, batch_info: Any, num_slices: int = 1) -> Tensor:
        index, rank = _only_adapter(batch_info)
        if not rank:
            return stock(inputs=inputs, weights=weights, batch_info=batch_info, num_slices=num_slices)
        output, width = inputs.new_zeros(len(inputs), weights.shape[1]), num_slices * rank
        output[:, :width] = linear(inputs, weights[index, :width]) * batch_info.scalings_cpu[index]
        return output

    return down


def up_projection(linear: Callable[[Tensor, Tensor], Tensor], stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replacement of SGLang's product by B; ``stock`` as in ``down_projection``."""

    def up(
        inputs: Tensor, weights: Tensor, batch_info: Any, slice_offsets: Tensor, base_output: Tensor | None = None
    ) -> Tensor:
        index, rank = _only_adapter(batch_info)
        if not rank or base_output is None:
            return stock(
                inputs=inputs,
                weights=weights,
                batch_info=batch_info,
                slice_offsets=slice_offsets,
                base_output=base_output,
            )
        for number, (start, end) in enumerate(itertools.pairwise(slice_offsets.tolist())):
            low = inputs[:, number * rank : (number + 1) * rank].contiguous()
            base_output[:, start:end] += linear(low, weights[index, start:end, :rank])
        return base_output

    return up


def _only_adapter(batch_info: Any) -> tuple[int, int]:
    """(index, rank) of the adapter of all requests of the batch; rank 0 if they have several, or none."""
    if batch_info.use_cuda_graph or batch_info.num_segments != 1:
        return 0, 0
    index = int(batch_info.weight_indices_cpu[0])
    return index, int(batch_info.lora_ranks_cpu[index])
