"""Runs SGLang on a machine without a GPU: an out-of-tree platform made of plain PyTorch operators.

SGLang finds ``activate`` through the entry point ``sglang.srt.platforms`` (pyproject.toml), in the launching process and
in every process that it spawns. Where CUDA is available ``activate`` returns None, and SGLang behaves as without
this file. Importing this module imports neither torch nor sglang: ``TorchCpuPlatform`` is in ``sglang_ops.py``,
which SGLang imports once the platform is chosen.
"""

import multiprocessing
import os
from typing import Any

from megatron_rl.cpu import sglang_start
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from megatron_rl.system.processes import process_probe


def activate() -> str | None:
    """SGLang's platform hook: the name of the class to use, or None if a GPU is present."""
    import torch

    if sglang_start.serves():
        process_probe.enable_probe("SGLang")
        sglang_start.hide_megatron()
    if torch.cuda.is_available():
        return None
    # SGLang decorates small functions with torch.compile; on a CPU each would call a C++ compiler at the first request.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    sglang_start.begin()
    declare_torchvision_ops()
    _fork_workers()
    return "megatron_rl.cpu.sglang_ops.TorchCpuPlatform"


def _fork_workers() -> None:
    """Let the launching process fork its scheduler and detokenizer instead of spawning them.

    A spawned process repeats all imports, about 12 s of CPU time each; a forked process starts immediately and
    shares the memory. SGLang spawns because a CUDA context does not survive a fork. Here no CUDA context exists,
    and at that moment the launching process runs one thread and has no event loop yet.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _choose_fork, HookType.AFTER)


def _choose_fork(result: None, *args: Any, **kwargs: Any) -> None:
    sglang_start.end()
    multiprocessing.set_start_method("fork", force=True)
