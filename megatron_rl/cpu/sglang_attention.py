"""SGLang's ``torch_native`` attention, faster on a CPU: one call for a whole decode batch."""

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class BatchedTorchNativeAttnBackend(TorchNativeAttnBackend):
    """``torch_native`` with one padded attention call for a decode batch, where SGLang makes one per sequence."""

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
        """Attention of one new token per sequence over its cached tokens.

        query, output: [sequences, heads, head size]; k_cache, v_cache: [slots, KV heads, head size];
        req_to_token: [requests, context] cache slot of each token; req_pool_indices, seq_lens: [sequences].
        """
        windowed = sliding_window_size is not None and sliding_window_size > -1
        if encoder_lens is not None or windowed:
            return super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
                encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
        longest = int(seq_lens.max())
        is_token = torch.arange(longest) < seq_lens[:, None]
        # Padding reads slot 0, which always exists; the mask keeps it out of the result.
        slots = torch.where(is_token, req_to_token[req_pool_indices, :longest], 0)
        keys = k_cache[slots].to(query.dtype).transpose(1, 2)
        values = v_cache[slots].to(query.dtype).transpose(1, 2)
        attended = scaled_dot_product_attention(
            query[:, :, None],
            keys,
            values,
            attn_mask=is_token[:, None, None],
            enable_gqa=enable_gqa,
            scale=scaling,
        )
        output.copy_(attended[:, :, 0])
        return output
