"""Attention over the paged cache: against brute force in float64, and bit-equal in different batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.cpu import attention_loop
from megatron_rl.cpu.simd import WIDTH

CONTEXT = 128


class Batch:
    """Sequences in a paged cache with random slot order; the last ``counts`` tokens of each are new."""

    def __init__(self, seed: int, shape: tuple[int, int, int, int], prefixes: list[int], counts: list[int], half: bool = False):
        num_heads, num_kv, size, value_size = shape
        generator = torch.Generator().manual_seed(seed)
        lengths = [prefix + count for prefix, count in zip(prefixes, counts)]
        num_slots = sum(lengths) + 7
        dtype = torch.bfloat16 if half else torch.float32
        # Use a view like the latent cache's values: memory between the heads must not be read.
        cache = torch.full((num_slots, num_kv, size + value_size + 3), torch.nan, dtype=dtype)
        self.keys, self.values = cache[..., :size], cache[..., size + 1 : size + 1 + value_size]
        self.keys.copy_(torch.randn(num_slots, num_kv, size, generator=generator))
        self.values.copy_(torch.randn(num_slots, num_kv, value_size, generator=generator))
        self.table = torch.full((len(counts) + 2, CONTEXT), -1, dtype=torch.int32)
        self.requests = torch.randperm(len(counts) + 2, generator=generator)[: len(counts)]
        slots = torch.randperm(num_slots, generator=generator).to(torch.int32)
        for request, part in zip(self.requests, slots[: sum(lengths)].split(lengths)):
            self.table[request, : len(part)] = part
        self.prefixes, self.counts = torch.tensor(prefixes), torch.tensor(counts)
        self.query = torch.randn(sum(counts), num_heads, size, generator=generator)
        self.shape = shape

    def attended(self, window: int = -1, sinks: Tensor | None = None) -> Tensor:
        return self.attended_by(self.query, self.requests, self.prefixes, self.counts, window, sinks)

    def attended_by(
        self, query: Tensor, requests: Tensor, prefixes: Tensor, counts: Tensor | None, window: int, sinks: Tensor | None = None
    ) -> Tensor:
        num_heads, num_kv, size, value_size = self.shape
        output = torch.full((len(query), num_heads, value_size), torch.nan)
        scratch = torch.full(((size + 4 * WIDTH) * (CONTEXT + 4 * WIDTH),), torch.nan)
        attention_loop.attend(
            attention_loop.AttentionShape(
                num_heads, num_kv, size, value_size, 0.3, window, sinks.data_ptr() if sinks is not None else 0
            ),
            attention_loop.pages_of(self.keys, self.values, self.table),
            attention_loop.QueryTokens(
                len(requests), requests.data_ptr(), prefixes.data_ptr(), counts.data_ptr() if counts is not None else 0
            ),
            query.data_ptr(),
            output.data_ptr(),
            scratch.data_ptr(),
        )
        return output

    def brute_force(self, window: int = -1, sinks: Tensor | None = None) -> Tensor:
        """Reference in float64, token by token."""
        group = self.shape[0] // self.shape[1]
        outputs = []
        for request, prefix, query in zip(self.requests, self.prefixes, self.query.double().split(self.counts.tolist())):
            for new, row in enumerate(query):
                last = int(prefix) + new
                slots = self.table[request, max(0, last - window) if window >= 0 else 0 : last + 1].long()
                keys = self.keys[slots].double().repeat_interleave(group, 1)
                scores = torch.einsum("hd,thd->ht", row, keys).mul(0.3)
                # A sink is one more score, without a value.
                scores = scores if sinks is None else torch.cat([scores, sinks.double()[:, None]], 1)
                weights = scores.softmax(-1)[:, : len(slots)]
                values = self.values[slots].double().repeat_interleave(group, 1)
                outputs.append(torch.einsum("ht,thd->hd", weights, values))
        return torch.stack(outputs)


SHAPES = [(4, 2, 16, 16), (1, 1, 128, 128), (6, 2, 20, 18), (14, 2, 64, 64), (4, 1, 24, 18), (3, 3, 7, 33)]


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("window", [-1, 0, 9])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_equals_float64(shape, window, half):
    batch = Batch(1, shape, prefixes=[0, 50, 3, 16, 0], counts=[1, 1, 40, 5, 33], half=half)
    torch.testing.assert_close(batch.attended(window).double(), batch.brute_force(window), atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("window", [-1, 0, 9])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_with_sinks_equals_float64(shape, window):
    batch = Batch(1, shape, prefixes=[0, 50, 3, 16, 0], counts=[1, 1, 40, 5, 33])
    sinks = torch.linspace(-30, 30, shape[0])
    torch.testing.assert_close(batch.attended(window, sinks).double(), batch.brute_force(window, sinks), atol=3e-6, rtol=3e-6)
    assert torch.equal(batch.attended(window, torch.full((shape[0],), -torch.inf)), batch.attended(window))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=6), st.integers(0, 99))
def test_attention_of_any_lengths_equals_float64(lengths, seed):
    prefixes, counts = map(list, zip(*lengths))
    batch = Batch(seed, (4, 2, 16, 16), prefixes, counts)
    torch.testing.assert_close(batch.attended().double(), batch.brute_force(), atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("window", [-1, 9])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_token_result_is_bit_equal_alone_and_in_any_prefill(shape, window):
    whole = Batch(2, shape, prefixes=[0, 5], counts=[70, 3])
    attended = whole.attended(window)
    for prefix in (0, 1, 31, 69):
        alone = whole.attended_by(
            whole.query[prefix : prefix + 1].contiguous(), whole.requests[:1], torch.tensor([prefix]), None, window
        )
        assert torch.equal(alone[0], attended[prefix])
        rest = whole.attended_by(
            whole.query[prefix:70].contiguous(), whole.requests[:1], torch.tensor([prefix]), torch.tensor([70 - prefix]), window
        )
        assert torch.equal(rest, attended[prefix:70])
