"""Random packed batches for the brute-force tests: ragged sequences, some empty, some fully masked, junk outside."""

import itertools
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.algorithms.loss import Loss


@dataclass(frozen=True)
class Ragged:
    cu_seqlens: Tensor
    """[N+1] int64"""
    mask: Tensor
    """[T] bool"""
    generator: torch.Generator

    @property
    def num_tokens(self) -> int:
        return len(self.mask)

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    def normal(self, scale: float = 1.0, *, junk: float = torch.nan) -> Tensor:
        """[T] float64, normally distributed; ``junk`` outside the mask."""
        numbers = scale * torch.randn(self.num_tokens, generator=self.generator, dtype=torch.float64)
        return torch.where(self.mask, numbers, junk)

    def logprobs(self, *, junk: float = torch.nan) -> Tensor:
        """[T] float64 below 0; ``junk`` outside the mask."""
        return torch.where(self.mask, -self.normal(2.0).abs(), junk)

    def uniform_of_sequence(self) -> Tensor:
        """[N] float64 within [0, 1)."""
        return torch.rand(self.num_sequences, generator=self.generator, dtype=torch.float64)

    def counted(self) -> list[list[int]]:
        """Indices of the counted tokens, one list per sequence."""
        corners = self.cu_seqlens.tolist()
        return [[t for t in range(a, b) if self.mask[t]] for a, b in itertools.pairwise(corners)]


@st.composite
def ragged(draw: st.DrawFn, *, max_sequences: int = 6, max_length: int = 12) -> Ragged:
    lengths = draw(st.lists(st.integers(0, max_length), max_size=max_sequences))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    share = torch.rand(len(lengths), generator=generator)
    # A third of the sequences has an empty mask, a third a full mask, the rest a random mask.
    share = torch.where(share < 1 / 3, 0.0, torch.where(share > 2 / 3, 1.0, share))
    sizes = torch.tensor(lengths, dtype=torch.int64)
    mask = torch.rand(int(sizes.sum()), generator=generator) < share.repeat_interleave(sizes)
    return Ragged(torch.nn.functional.pad(sizes.cumsum(0), (1, 0)), mask, generator)


def assert_close(actual: Tensor, expected: Tensor | list[float] | float, tolerance: float = 1e-10) -> None:
    """Compare in float64."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.detach().double(), expected, rtol=tolerance, atol=tolerance)


def gradient(loss: Loss, leaf: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(loss.sum, leaf)
    return found.tolist()


def vectors(*rows: list[float]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def random_batch(seed: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """New log-probs with gradient, old log-probs, advantages, mask; ratios are from far below to far above the clip range."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(num_tokens, generator=generator, dtype=torch.float64)
    new = (old + torch.randn(num_tokens, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    mask = (torch.rand(num_tokens, generator=generator) < 0.7).double()
    return new, old, advantages, mask
