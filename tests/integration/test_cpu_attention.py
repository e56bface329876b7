"""The compiled attention backend of SGLang's servers on a CPU against SGLang's own ``torch_native``, without a server."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops

CONTEXT = 64


class Pool:
    """KV pool of one layer; latent: the values are the first part of the keys, as in DeepSeek's pool."""

    def __init__(self, num_kv: int, size: int, value_size: int, dtype: torch.dtype) -> None:
        self.keys = torch.randn(256, num_kv, size).to(dtype)
        self.values = self.keys[..., :value_size] if num_kv == 1 else torch.randn(256, num_kv, value_size).to(dtype)

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.values


def make_batch(prefixes: list[int], counts: list[int], *, decode: bool) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    held, new = torch.tensor(prefixes), torch.tensor(counts)
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
        req_pool_indices=torch.tensor([3, 0, 2])[: len(counts)],
        seq_lens=held + new,
        extend_prefix_lens=None if decode else held.to(torch.int32),
        extend_seq_lens=None if decode else new.to(torch.int32),
        out_cache_loc=None,
        encoder_lens=None,
    )


@pytest.mark.parametrize("decode", [True, False], ids=["decode", "extend"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads", [(4, 2, 16, 16), (4, 4, 20, 20), (8, 1, 24, 18)], ids=str)
def test_attention_equals_torch_native(heads, window, dtype, decode):
    declare_torchvision_ops()
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import AttentionType

    from megatron_rl.cpu.sglang_attention import PagedTorchNativeAttnBackend

    num_heads, num_kv, size, value_size = heads
    torch.manual_seed(0)
    pool = Pool(num_kv, size, value_size, dtype)
    table = SimpleNamespace(req_to_token=torch.randperm(256, dtype=torch.int32).view(4, CONTEXT))
    runner = SimpleNamespace(device="cpu", req_to_token_pool=table, token_to_kv_pool=pool)
    counts = [1, 1, 1] if decode else [9, 1, 30]
    batch = make_batch([20, 3, 0], counts, decode=decode)
    layer = SimpleNamespace(
        tp_q_head_num=num_heads, tp_k_head_num=num_kv, qk_head_dim=size, v_head_dim=value_size, layer_id=0, scaling=0.3,
        sliding_window_size=window, is_cross_attention=False, attn_type=AttentionType.DECODER,
    )  # fmt: skip
    query = torch.randn(sum(counts), num_heads * size).to(dtype)
    outputs = []
    for backend_class in (TorchNativeAttnBackend, PagedTorchNativeAttnBackend):
        backend = backend_class(runner)
        backend.init_forward_metadata(batch)
        forward = backend.forward_decode if decode else backend.forward_extend
        outputs.append(forward(query, None, None, layer, batch, save_kv_cache=False).float())
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(outputs[1], outputs[0], atol=tolerance, rtol=tolerance)
    assert backend.rows is not None
