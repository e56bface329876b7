"""Chunked log-probs and entropies against full softmax in float64."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.models.logprobs import token_logprobs_and_entropy

VOCAB, HIDDEN = 23, 5


def inputs(n: int, padding: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    # Padding rows have large values, which would change the results visibly.
    weight = torch.randn(VOCAB + padding, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight[VOCAB:] = 100.0
    return hidden, weight.requires_grad_(), torch.randint(0, VOCAB, (n,), generator=generator)


def by_full_softmax(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, excluded: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Expected log-probs and entropy over a vocabulary without the excluded tokens."""
    kept = [token for token in range(VOCAB) if token not in excluded]
    log_p = (hidden.double() @ weight[kept].double().t() / temperature).log_softmax(-1)
    targets = torch.tensor([kept.index(token) for token in targets.tolist()])
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 40),
    chunk_size=st.integers(1, 50),
    temperature=st.floats(0.2, 5.0),
    padding=st.integers(0, 3),
    parts=st.sampled_from(["logprobs", "entropy", "both"]),
    excluded=st.sets(st.integers(0, VOCAB - 1), max_size=6).map(sorted),
)
def test_log_probs_and_gradients_equal_full_softmax(
    n: int, chunk_size: int, temperature: float, padding: int, parts: str, excluded: list[int]
) -> None:
    hidden, weight, targets = inputs(n, padding)
    targets = torch.tensor([next(t % VOCAB for t in range(i, i + VOCAB) if t % VOCAB not in excluded) for i in targets])
    found = token_logprobs_and_entropy(
        hidden,
        weight,
        targets,
        vocab_size=VOCAB,
        temperature=temperature,
        chunk_size=chunk_size,
        excluded=excluded,
    )
    expected = by_full_softmax(hidden, weight, targets, temperature, excluded)
    factors = torch.linspace(-1.0, 2.0, n, dtype=torch.float64)
    losses = []
    for logprobs, entropy in (found, expected):
        total = hidden.new_zeros(())
        if parts in ("logprobs", "both"):
            total = total + (factors * logprobs).sum()
        if parts in ("entropy", "both"):
            total = total + (factors.square() * entropy).sum()
        losses.append(total)
    for ours, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-12, rtol=1e-10)
    gradients = [torch.autograd.grad(loss, (hidden, weight)) for loss in losses]
    for ours, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("parts", ["logprobs", "both"])
def test_log_probs_of_several_targets_per_token_are_those_of_each_target_alone(parts: str) -> None:
    """One column of the table is the sampled token, the others are the teacher's; their gradients add up."""
    hidden, weight, _ = inputs(30)
    generator = torch.Generator().manual_seed(2)
    targets, factors = torch.randint(0, VOCAB, (30, 4), generator=generator), torch.randn(30, 4, generator=generator).double()
    options = {"vocab_size": VOCAB, "temperature": 0.7, "chunk_size": 7, "excluded": [3]}
    together, entropy = token_logprobs_and_entropy(hidden, weight, targets, **options)
    alone = torch.stack([token_logprobs_and_entropy(hidden, weight, column, **options)[0] for column in targets.unbind(1)], 1)
    assert torch.equal(together, alone)
    of_entropy = entropy.sum() if parts == "both" else 0.0
    losses = [(factors * found).sum() + of_entropy for found in (together, alone)]
    gradients = [torch.autograd.grad(loss, (hidden, weight), retain_graph=True) for loss in losses]
    for ours, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-12, rtol=1e-10)


def test_excluded_tokens_have_zero_probability_and_gradient() -> None:
    hidden, weight, targets = inputs(8)
    targets[3] = 5
    logprobs, entropy = token_logprobs_and_entropy(hidden, weight, targets, vocab_size=VOCAB, excluded=[5, 7])
    assert logprobs[3] < -1e8 and logprobs.isfinite().all() and entropy.isfinite().all()
    gradients = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))
    assert all(g.isfinite().all() for g in gradients) and (gradients[1][[5, 7]] == 0).all()


def test_log_probs_of_large_logits_do_not_overflow() -> None:
    hidden, weight, targets = inputs(6)
    logprobs, entropy = token_logprobs_and_entropy(hidden * 1e3, weight, targets, vocab_size=VOCAB)
    expected = by_full_softmax(hidden * 1e3, weight, targets, 1.0)
    assert expected[0].min() < -800
    torch.testing.assert_close(logprobs, expected[0])
    assert entropy.isfinite().all() and (entropy >= 0).all()


def test_log_probs_multiply_bfloat16_inputs_in_float32() -> None:
    hidden, weight, targets = inputs(30, dtype=torch.bfloat16)
    logprobs, entropy = token_logprobs_and_entropy(hidden, weight, targets, vocab_size=VOCAB)
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected = by_full_softmax(hidden, weight, targets, 1.0)
    torch.testing.assert_close(logprobs.double(), expected[0], atol=1e-5, rtol=1e-5)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("exact", [False, True])
def test_log_prob_gradients_in_bfloat16_are_close_to_exact(exact: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    n, hidden_size, vocab_size = 300, 64, 3000
    hidden = torch.randn(n, hidden_size, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(vocab_size, hidden_size, generator=generator) / 4).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab_size, (n,), generator=generator)
    factors = torch.randn(n, generator=generator)
    logprobs, entropy = token_logprobs_and_entropy(
        hidden, weight, targets, vocab_size=vocab_size, exact_gradients=exact
    )
    ours = torch.autograd.grad((factors * logprobs).sum() - 0.1 * entropy.sum(), (hidden, weight))
    copies = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    log_p = (copies[0] @ copies[1].t()).log_softmax(-1)
    loss = (factors * log_p.gather(1, targets[:, None])[:, 0]).sum() + 0.1 * (log_p.exp() * log_p).sum()
    for found, reference in zip(ours, torch.autograd.grad(loss, copies), strict=True):
        rounded = (reference.bfloat16().double() - reference).norm() / reference.norm()
        off = (found.double() - reference).norm() / reference.norm()
        assert found.dtype == torch.bfloat16
        assert off < rounded * (1.02 if exact else 1.6), (float(off), float(rounded))
        # No bias: rounding errors cancel on average.
        assert abs(float((found.double() * reference).sum() / reference.square().sum()) - 1) < 5e-4


def test_log_probs_of_empty_batches_have_zero_gradients() -> None:
    hidden, weight, targets = inputs(1)
    hidden = hidden.detach()[:0].requires_grad_()
    logprobs, entropy = token_logprobs_and_entropy(hidden, weight, targets[:0], vocab_size=VOCAB)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert hidden.grad.shape == (0, HIDDEN) and (weight.grad == 0).all()


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor created inside the block."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_log_probs_allocate_logits_of_one_chunk_only() -> None:
    n, chunk_size = 400, 10
    hidden, weight, targets = inputs(n)
    with LargestTensor() as largest:
        logprobs, entropy = token_logprobs_and_entropy(hidden, weight, targets, vocab_size=VOCAB, chunk_size=chunk_size)
        (logprobs.sum() + entropy.sum()).backward()
    assert max(chunk_size * VOCAB, n * HIDDEN) <= largest.elements < n * VOCAB


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_log_probs_reject_non_positive_temperatures(temperature: float) -> None:
    hidden, weight, targets = inputs(2)
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs_and_entropy(hidden, weight, targets, vocab_size=VOCAB, temperature=temperature)
