"""SGLang's ``torch_native`` attention, faster on a CPU: its cost is proportional to the cached tokens, without padding."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

from megatron_rl.cpu import attention_loop


class PagedTorchNativeAttnBackend(TorchNativeAttnBackend):
    """Same as ``torch_native``, with one compiled call per layer for decode and prefill, not one per sequence."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.rows: attention_loop.QueryTokens | None = None
        self._owners: list[Tensor] = []
        """Tensors that keep the memory behind the addresses in ``rows`` alive."""
        self._scratch = torch.empty(0)
        self._sinks: Tensor | None = None
        """[heads] float32: sinks of the layer that runs."""

    def forward_extend(self, *args: Any, sinks: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Same as ``torch_native``, which has no sinks, with them."""
        return self._with_sinks(super().forward_extend, sinks, args, kwargs)

    def forward_decode(self, *args: Any, sinks: Tensor | None = None, **kwargs: Any) -> Tensor:
        return self._with_sinks(super().forward_decode, sinks, args, kwargs)

    def _with_sinks(self, forward: Callable[..., Tensor], sinks: Tensor | None, args: Any, kwargs: Any) -> Tensor:
        self._sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
        return forward(*args, **kwargs)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        requests, lengths = forward_batch.req_pool_indices, forward_batch.seq_lens
        if forward_batch.forward_mode.is_decode():
            held = [requests.to(torch.int64), lengths.to(torch.int64) - 1]
        elif forward_batch.extend_seq_lens is not None:
            counts = forward_batch.extend_seq_lens.to(torch.int64)
            held = [requests.to(torch.int64), lengths.to(torch.int64) - counts, counts]
        else:
            self.rows = None
            return
        self._owners = held
        addresses = [tensor.data_ptr() for tensor in held]
        self.rows = attention_loop.QueryTokens(len(requests), addresses[0], addresses[1], addresses[2] if len(addresses) > 2 else 0)

    def _run_sdpa_forward_extend(  # noqa: PLR0913  SGLang calls it so
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        extend_prefix_lens: Tensor,
        extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> Tensor:
        if encoder_lens is None and causal and self._attend(
            query, output, (k_cache, v_cache), req_to_token, scaling, sliding_window_size
        ):
            return output
        return super()._run_sdpa_forward_extend(
            query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
            extend_seq_lens, encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
        )  # fmt: skip

    def _run_sdpa_forward_decode(  # noqa: PLR0913  SGLang calls it so
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> Tensor:
        if encoder_lens is None and self._attend(
            query, output, (k_cache, v_cache), req_to_token, scaling, sliding_window_size
        ):
            return output
        return super()._run_sdpa_forward_decode(
            query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
            encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
        )  # fmt: skip

    def _attend(
        self,
        query: Tensor,
        output: Tensor,
        cache: tuple[Tensor, Tensor],
        req_to_token: Tensor,
        scaling: float | None,
        window: int | None,
    ) -> bool:
        """Causal attention of the batch's new tokens with ``attention_loop.attend``. Returns False if it does not apply.

        query, output: [new tokens, heads, head size]; cache: keys and values [slots, KV heads, head size];
        req_to_token: [requests, context] cache slot of each token.
        """
        keys, values = cache
        if self.rows is None or self.use_sliding_window_kv_pool or not _fits(keys, values, req_to_token):
            if self._sinks is not None:
                raise ValueError("attention sinks on a CPU: expected one cache of float32 or bfloat16 for all layers, and new tokens")
            return False
        num_heads, size = query.shape[1:]
        if scaling is None:
            scaling = size**-0.5
        heads = attention_loop.AttentionShape(
            num_heads, keys.shape[1], size, values.shape[2], scaling, -1 if window is None else window,
            0 if self._sinks is None else self._sinks.data_ptr(),
        )  # fmt: skip
        in_floats = query.to(torch.float32).contiguous()
        whole = output.dtype == torch.float32 and output.is_contiguous()
        attended = output if whole else torch.empty(output.shape, dtype=torch.float32)
        num_scratch = attention_loop.scratch_floats(size, req_to_token.shape[1])
        if len(self._scratch) < num_scratch:
            self._scratch = torch.empty(num_scratch, dtype=torch.float32)
        attention_loop.attend(
            heads,
            attention_loop.pages_of(keys, values, req_to_token),
            self.rows,
            in_floats.data_ptr(),
            attended.data_ptr(),
            self._scratch.data_ptr(),
        )
        if not whole:
            output.copy_(attended)
        return True


def _fits(keys: Tensor, values: Tensor, req_to_token: Tensor) -> bool:
    return (
        keys.dtype == values.dtype
        and keys.dtype in (torch.float32, torch.bfloat16)
        and keys.stride(2) == values.stride(2) == req_to_token.stride(1) == 1
        and req_to_token.dtype == torch.int32
    )
