"""Speed of offloading a model from a GPU and reloading it; skipped without a GPU."""

import time

import pytest
import torch

from megatron_rl.training.model_memory import _HostBuffer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_BYTES = 2**30


def test_a_gibibyte_is_offloaded_to_pinned_memory_and_reloaded_bit_for_bit():
    tensors = [torch.randint(256, (NUM_BYTES // 4,), dtype=torch.uint8, device="cuda") for _ in range(4)]
    expected = [tensor.cpu() for tensor in tensors]
    stash = _HostBuffer(lambda: tensors)
    before = torch.cuda.memory_allocated()
    assert stash.out() and before - torch.cuda.memory_allocated() >= NUM_BYTES
    assert stash._host is not None and stash._host.is_pinned() and len(stash._host) == NUM_BYTES
    seconds = {}
    for _ in range(2):  # the first way back has the allocator ask the device
        start = time.perf_counter()
        stash.back()
        seconds["back"] = time.perf_counter() - start
        stash.is_copied = False
        start = time.perf_counter()
        stash.out()
        seconds["out"] = time.perf_counter() - start
    stash.back()
    assert all(torch.equal(tensor.cpu(), wanted) for tensor, wanted in zip(tensors, expected, strict=True))
    print({way: f"{NUM_BYTES / value / 1e9:.1f} GB/s" for way, value in seconds.items()})
