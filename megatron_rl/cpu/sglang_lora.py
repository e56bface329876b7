"""SGLang's adapters (``--lora-backend torch_native``) on a CPU: their memory is pinned unconditionally, which needs an accelerator.

``tests/unit/cpu/test_sglang_lora.py`` fails when SGLang pins memory elsewhere.
"""

import importlib
from typing import Any

import torch

from megatron_rl.cpu.megatron import FACTORIES, ModuleCopy, on_cpu

MODULES = ("layers", "lora", "backend.torch_backend")
"""Modules of ``sglang.srt.lora`` that pin memory on the way of ``torch_native``."""


def install() -> None:
    """Make the modules' factories and ``Tensor.pin_memory`` return plain memory, in this process."""
    plain = ModuleCopy(torch, {name: on_cpu(getattr(torch, name)) for name in FACTORIES})
    for name in MODULES:
        vars(importlib.import_module(f"sglang.srt.lora.{name}"))["torch"] = plain
    torch.Tensor.pin_memory = _unpinned  # type: ignore[method-assign, assignment]


def _unpinned(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor
