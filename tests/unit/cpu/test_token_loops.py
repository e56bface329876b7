"""The compiled small layers against float64, and seeded sampling against SGLang's tensor implementation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.cpu import token_loops
from megatron_rl.cpu.murmur_hash import murmur_hash32
from megatron_rl.cpu.simd import WIDTH


@pytest.mark.parametrize("size", [1, 16, 37, 64, 130])
@pytest.mark.parametrize("adds", [False, True])
def test_norm_equals_float64(size, adds):
    x, residual, weight = torch.randn(5, size), torch.randn(5, size), torch.randn(size)
    total = x + residual if adds else x
    output = torch.empty_like(x)
    token_loops.norm(
        x.data_ptr(), residual.data_ptr() if adds else 0, weight.data_ptr(), output.data_ptr(), 5, size, 1e-6
    )
    expected = torch.nn.functional.rms_norm(total.double(), (size,), weight.double(), 1e-6)
    torch.testing.assert_close(output.double(), expected, atol=1e-6, rtol=1e-6)
    assert not adds or torch.equal(residual, total)


@pytest.mark.parametrize("size", [1, 16, 37])
def test_gate_equals_float64(size):
    x = torch.randn(5, 2 * size) * 30
    x[0, 0], x[1, 0] = 200.0, -200.0
    output = torch.empty(5, size)
    token_loops.gate(x.data_ptr(), output.data_ptr(), 5, size)
    expected = torch.nn.functional.silu(x[:, :size].double()) * x[:, size:].double()
    torch.testing.assert_close(output.double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary", [6, 10])
def test_rotary_embedding_equals_complex_multiplication(neox, rotary):
    fused = torch.randn(5, 3 * 10 + 4)
    heads, kept = fused[:, 2:32], fused.clone()
    positions, angles = torch.tensor([0, 3, 1, 7, 7]), torch.rand(8, rotary // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    token_loops.rotate(heads.data_ptr(), 34, 5, (3, rotary, int(neox)), positions.data_ptr(), cos_sin.data_ptr(), 10)
    x = kept[:, 2:32].view(5, 3, 10)[..., :rotary].double()
    pairs = x.unflatten(-1, (2, -1)).transpose(-1, -2) if neox else x.unflatten(-1, (-1, 2))
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[positions, None].to(torch.complex128)
    expected = torch.view_as_real(turned)
    expected = expected.transpose(-1, -2).flatten(-2) if neox else expected.flatten(-2)
    result = heads.unflatten(1, (3, 10))
    torch.testing.assert_close(result[..., :rotary].double(), expected, atol=2e-6, rtol=2e-6)
    kept[:, 2:32].view(5, 3, 10)[..., :rotary] = result[..., :rotary]
    assert torch.equal(kept, fused)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**20))
@settings(max_examples=50, deadline=None)
def test_scalar_hash_equals_the_tensor_hash(seed, position, column):
    expected = murmur_hash32(torch.tensor([seed]), torch.tensor([position]), torch.tensor([column]))
    assert token_loops.murmur(seed, position, column) == int(expected)


def sampled_by_torch(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """SGLang's seeded sampling: the argmax of log-probs and Gumbel noise of the hash."""
    uniform = murmur_hash32(seeds, positions, torch.arange(logits.shape[1])).double() / 0xFFFFFFFF
    smallest = torch.finfo(torch.float64).min
    noise = -(-uniform.log().clamp(min=smallest, max=-(2.0**-32))).log()
    return (torch.log_softmax((logits / temperatures[:, None]).double(), -1) + noise).argmax(1)


@pytest.mark.parametrize("size", [1, 17, 128, 5003])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_sampled_tokens_equal_the_tensor_implementation(size, spread):
    num = 40
    torch.manual_seed(size)
    logits, temperatures = torch.randn(num, size) * spread, torch.rand(num) + 0.3
    if size > 16:
        logits[:, 3], logits[:, 9] = -1e9, -torch.inf
    seeds, positions = torch.randint(0, 2**62, (num,)), torch.randint(0, 9999, (num,))
    tokens, logprobs, weights = torch.empty(num, dtype=torch.int64), torch.empty(num), torch.empty(size + WIDTH)
    expected = sampled_by_torch(logits, temperatures, seeds, positions)
    expected_logprobs = torch.log_softmax((logits / temperatures[:, None]).double(), -1).gather(1, expected[:, None])
    draws = token_loops.SamplingArrays(temperatures.data_ptr(), seeds.data_ptr(), positions.data_ptr())
    token_loops.sample(
        logits.data_ptr(), num, size, draws, tokens.data_ptr(), logprobs.data_ptr(), weights.data_ptr()
    )
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(logprobs.double(), expected_logprobs[:, 0], atol=2e-6, rtol=2e-6)
