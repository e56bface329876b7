"""All layers of a dense decoder in one call: against float64, and bit-equal alone and in a batch."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from megatron_rl.cpu import layer_loop
from megatron_rl.cpu.attention_loop import AttentionShape, QueryTokens, pages_of
from megatron_rl.cpu.simd import WIDTH

HIDDEN, INTERMEDIATE, HEADS, KV, SIZE, LAYERS, CONTEXT = 24, 40, 4, 2, 10, 2, 32
WIDTH_OF_HEADS = (HEADS + 2 * KV) * SIZE
pytestmark = pytest.mark.skipif(not layer_loop.has_mkl(), reason="this PyTorch has no MKL")


class Model:
    """Random weights; ``biased`` like Qwen2, ``normed`` heads like Qwen3."""

    def __init__(self, *, biased: bool, normed: bool) -> None:
        generator = torch.Generator().manual_seed(3)

        def weights(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) * 0.4

        self.layers = [
            dict(
                input_norm=weights(HIDDEN),
                qkv=weights(WIDTH_OF_HEADS, HIDDEN),
                qkv_bias=weights(WIDTH_OF_HEADS) if biased else None,
                query_norm=weights(SIZE) if normed else None,
                key_norm=weights(SIZE) if normed else None,
                output=weights(HIDDEN, HEADS * SIZE),
                output_bias=weights(HIDDEN) if biased else None,
                mlp_norm=weights(HIDDEN),
                gate_up=weights(2 * INTERMEDIATE, HIDDEN),
                down=weights(HIDDEN, INTERMEDIATE),
                keys=torch.zeros(CONTEXT, KV, SIZE),
                values=torch.zeros(CONTEXT, KV, SIZE),
            )
            for _ in range(LAYERS)
        ]
        angles = torch.rand(CONTEXT, SIZE // 2, generator=generator) * 6
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
        self.slots = torch.randperm(CONTEXT, generator=generator)
        self.table = self.slots.to(torch.int32).view(1, CONTEXT)

    def hidden(self, embedded: Tensor, prefix: int) -> Tensor:
        """Result of the loop; earlier calls have cached the prefix's keys and values."""
        num = len(embedded)
        sizes = layer_loop.DecoderSizes(LAYERS, HIDDEN, INTERMEDIATE, SIZE, 1, 1e-6, self.cos_sin.data_ptr())
        heads = AttentionShape(HEADS, KV, SIZE, SIZE, SIZE**-0.5, -1)
        first = self.layers[0]
        held = [torch.tensor([0]), torch.tensor([prefix]), torch.tensor([num])]
        positions = torch.arange(prefix, prefix + num)
        slots = self.slots[positions].contiguous()
        scratch = torch.zeros(
            layer_loop.scratch_floats(sizes, heads, num) + (SIZE + 4 * WIDTH) * (CONTEXT + 4 * WIDTH)
        )
        columns = [[layer[name] for name in layer_loop.TABLE] for layer in self.layers]
        addresses = torch.tensor([[0 if tensor is None else tensor.data_ptr() for tensor in row] for row in columns])
        hidden = torch.zeros(max(num, layer_loop.MIN_ROWS), HIDDEN)
        hidden[:num] = embedded
        layer_loop.layers(
            sizes,
            heads,
            pages_of(first["keys"], first["values"], self.table),
            QueryTokens(1, *[tensor.data_ptr() for tensor in held]),
            layer_loop.TokenArrays(num, positions.data_ptr(), slots.data_ptr()),
            addresses.data_ptr(),
            hidden.data_ptr(),
            scratch.data_ptr(),
        )
        return hidden[:num]

    def brute_force(self, embedded: Tensor) -> Tensor:
        """Reference in float64, without a cache."""
        x = embedded.double()
        cos, sin = self.cos_sin[: len(x), None].double().chunk(2, -1)
        future = torch.ones(len(x), len(x)).triu(1).bool()
        for floats in self.layers:
            layer = {name: None if tensor is None else tensor.double() for name, tensor in floats.items()}
            fused = linear(rms_norm(x, (HIDDEN,), layer["input_norm"], 1e-6), layer["qkv"], layer["qkv_bias"])
            query, key, value = fused.view(len(x), -1, SIZE).split([HEADS, KV, KV], 1)
            if layer["query_norm"] is not None:
                query = rms_norm(query, (SIZE,), layer["query_norm"], 1e-6)
                key = rms_norm(key, (SIZE,), layer["key_norm"], 1e-6)
            query, key = (
                torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
                for a, b in (query.chunk(2, -1), key.chunk(2, -1))
            )
            scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(HEADS // KV, 1)) * SIZE**-0.5
            weights = scores.masked_fill(future, -torch.inf).softmax(-1)
            mixed = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(HEADS // KV, 1)).flatten(1)
            x = x + linear(mixed, layer["output"], layer["output_bias"])
            gate, up = linear(rms_norm(x, (HIDDEN,), layer["mlp_norm"], 1e-6), layer["gate_up"]).chunk(2, -1)
            x = x + linear(silu(gate) * up, layer["down"])
        return x


@pytest.mark.parametrize("kind", [dict(biased=True, normed=False), dict(biased=False, normed=True)], ids=["qwen2", "qwen3"])
def test_layers_equal_float64_and_are_bit_equal_for_a_single_token(kind):
    model = Model(**kind)
    embedded = torch.randn(25, HIDDEN, generator=torch.Generator().manual_seed(4))
    whole = model.hidden(embedded, 0)
    torch.testing.assert_close(whole.double(), model.brute_force(embedded), atol=2e-5, rtol=2e-5)
    for layer in model.layers:
        layer["keys"].fill_(torch.nan)
        layer["values"].fill_(torch.nan)
    parts = [model.hidden(embedded[:7], 0), model.hidden(embedded[7:24], 7), model.hidden(embedded[24:], 24)]
    assert torch.equal(torch.cat(parts), whole)
