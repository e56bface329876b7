"""The stand-ins of Gated DeltaNet's kernels against a recurrence token by token, and sequences alone against a pack."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.cpu.delta_rule import causal_conv1d, chunk_gated_delta_rule, l2norm

PACKS = [[5], [1, 70, 3, 64, 130, 0, 2], [200, 1, 1]]
HEADS, KEY, VALUE = 3, 4, 5
by_pack = pytest.mark.parametrize("lengths", PACKS, ids=str)


def bounds_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def make_inputs(num_rows: int) -> list[Tensor]:
    """Queries, keys, values, log-decays and steps [1, T, heads, ...] in float64."""
    torch.manual_seed(num_rows)
    shape = (1, num_rows, HEADS)
    queries, keys = (l2norm(torch.randn(*shape, KEY).double()) for _ in range(2))
    values = torch.randn(*shape, VALUE).double()
    return [t.requires_grad_() for t in (queries, keys, values, -2 * torch.rand(shape).double(), torch.rand(shape).double())]


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and last state of one sequence, token by token."""
    outputs = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        change = (v[t] - torch.einsum("hk,hkv->hv", k[t], state)) * beta[t][:, None]
        state = state + torch.einsum("hk,hv->hkv", k[t], change)
        outputs.append(torch.einsum("hk,hkv->hv", q[t] * KEY**-0.5, state))
    return (torch.stack(outputs) if outputs else v.new_zeros(0, HEADS, VALUE)), state


@by_pack
def test_the_chunked_rule_equals_the_recurrence_in_outputs_states_and_gradients(lengths: list[int]) -> None:
    bounds, inputs = bounds_of(lengths), make_inputs(sum(lengths))
    initial = torch.randn(len(lengths), HEADS, KEY, VALUE).double().requires_grad_()
    found, states = chunk_gated_delta_rule(*inputs, initial_state=initial, output_final_state=True, cu_seqlens=bounds)
    rows = [slice(start, end) for start, end in itertools.pairwise(bounds)]
    alone = [recurrence(*(t[0, own] for t in inputs), initial[i]) for i, own in enumerate(rows)]
    expected = torch.cat([outputs for outputs, _ in alone])
    torch.testing.assert_close(found[0], expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(states, torch.stack([state for _, state in alone]).float(), atol=1e-6, rtol=0)
    weights = torch.randn_like(expected)
    gradients = (torch.autograd.grad((outputs * weights).sum(), [*inputs, initial]) for outputs in (found[0], expected))
    for ours, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-11, rtol=0)


@by_pack
def test_the_convolution_of_a_pack_equals_that_of_its_sequences(lengths: list[int]) -> None:
    bounds, rows = bounds_of(lengths), torch.randn(1, sum(lengths), 6).double()
    weight = torch.randn(6, 4).double()
    found, _ = causal_conv1d(rows, weight, activation="silu", cu_seqlens=bounds)
    alone = [F.pad(rows[0, start:end].T, (3, 0))[None] for start, end in itertools.pairwise(bounds) if end > start]
    expected = torch.cat([F.silu(F.conv1d(part, weight[:, None], groups=6))[0].T for part in alone])
    torch.testing.assert_close(found[0], expected, atol=1e-12, rtol=0)


def test_no_gradient_passes_from_one_sequence_to_another() -> None:
    inputs, bounds = make_inputs(90), torch.tensor([0, 70, 90])
    found, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=bounds)
    for gradient in torch.autograd.grad(found[0, 70:].square().sum(), inputs):
        assert gradient[0, :70].abs().max() == 0 and gradient[0, 70:].abs().max() > 0
