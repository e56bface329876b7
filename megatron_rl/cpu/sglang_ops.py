"""``TorchCpuPlatform``: SGLang 0.5.23 on plain PyTorch CPU operators, without sgl_kernel and Triton.

Only SGLang imports this module, after ``sglang_platform.activate`` has named the class. This happens in the middle
of ``import sglang``, so the hooks import everything else of SGLang themselves. The hooks are called in this order:
``apply_server_args_defaults`` in the launching process; ``init_backend`` and ``post_load_model`` in each
scheduler.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from megatron_rl.cpu import sglang_start
from megatron_rl.cpu.murmur_hash import murmur_hash32

STOCK_KERNELS = "MEGATRON_RL_STOCK_KERNELS"
"""Environment variable: 1 makes SGLang use its own PyTorch fallbacks, for comparisons."""
_DEFAULT_MAX_TOTAL_TOKENS = 65536
"""Tokens in the KV pool. SGLang's own default would take 72 % of the node's memory."""


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    # Out-of-tree instead of CPU, because SGLang's own CPU code paths import sgl_kernel.
    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        from sglang.srt.arg_groups import choices, model_hook

        # Allow --enable-deterministic-inference, which is needed for per-sample seeds, with this backend.
        choices.add_deterministic_attention_backend_choices(["torch_native"])
        choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = "torch_native"
        # Overlap hides the scheduler during device work; on a CPU both use the same cores.
        server_args.disable_overlap_schedule = True
        # The backend has sinks (``sglang_attention.py``), which SGLang's own check of gpt-oss does not know.
        known = model_hook.attention_backends_of
        model_hook.attention_backends_of = lambda args: tuple("triton" if b == "torch_native" else b for b in known(args))
        # torch_native addresses one cache, not a second, smaller one for the layers with windows.
        server_args.disable_hybrid_swa_memory = True
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = _DEFAULT_MAX_TOTAL_TOKENS
        if server_args.dtype == "float32":
            # Linear attention keeps the convolution's last inputs in bfloat16 otherwise.
            os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")
        sglang_start.skip_unserved_models(server_args)

    def init_backend(self) -> None:
        """Install PyTorch functions where SGLang would call Triton or sgl_kernel."""
        import sglang.srt.batch_invariant_ops as batch_invariant_ops
        import sglang.srt.layers.sampler as sampler
        import sglang.srt.model_loader.loader as loader
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.mem_cache.pool_host import common as host_pool

        # --enable-deterministic-inference swaps in Triton matmuls and calls sgl_kernel's hash.
        batch_invariant_ops.enable_batch_invariant_mode = lambda *args, **kwargs: None
        sampler.murmur_hash32 = murmur_hash32
        # --enable-return-routed-experts would allocate memory pinned by CUDA.
        host_pool.ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, **_: torch.empty(dims, dtype=dtype)
        loader._initialize_model = _in_one_dtype(loader._initialize_model)
        if os.environ.get(STOCK_KERNELS) != "1":
            from megatron_rl.cpu import attention_loop, sglang_layers, token_loops
            from megatron_rl.cpu.sglang_attention import PagedTorchNativeAttnBackend

            ATTENTION_BACKENDS["torch_native"] = PagedTorchNativeAttnBackend
            sglang_layers.install(self.get_dispatch_key_name())
            for backend in ("pytorch", "flashinfer"):
                sampler.register_sampler_backend(backend, sglang_layers.CompiledSampler)
            attention_loop.compile_now()
            token_loops.compile_now()

    def post_load_model(self, model: Any) -> None:
        """Install what adapters need, or fuse the decoder, and let DeepSeek's attention use the latent KV pool.

        SGLang's fallback prefills with expanded keys and values, but ``torch_native`` reads the latent pool: wrong
        output without an error.
        """
        from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
        from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
        from sglang.srt.runtime_context import get_lora

        from megatron_rl.cpu import sglang_delta_net

        sglang_delta_net.install(model)
        # The fused decoder does not run SGLang's layers, and so no adapter.
        if get_lora().enable_lora:
            from megatron_rl.cpu import sglang_layers, sglang_lora

            sglang_lora.install(sglang_layers.linear)
        elif os.environ.get(STOCK_KERNELS) != "1":
            from megatron_rl.cpu import sglang_fused_decoder

            sglang_fused_decoder.fuse(model)
        AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)


def _in_one_dtype(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """``initialize``, which builds a model, with all weights in the server's dtype.

    SGLang takes the dtype of some layers of gpt-oss from config.json, and its sinks are always bfloat16.
    """

    def initialize_model(model_config: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_default_dtype()
        model_config.hf_config.dtype = dtype
        model = initialize(model_config, *args, **kwargs)
        for module in model.modules():
            if module._parameters.get("sinks") is not None:
                module.sinks = torch.nn.Parameter(module.sinks.to(dtype), requires_grad=False)
        return model

    return initialize_model
