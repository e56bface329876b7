"""Log-probabilities and entropies from hidden states, computed without the logits of more than one chunk of tokens.

The vocabulary is split over the tensor-parallel group. Each rank computes its columns of the logits in float32, and
the group exchanges four values per token. The backward pass recomputes the logits chunk by chunk.

In a bfloat16 model the gradients of the logits are rounded to bfloat16 before their products, with float32 sums:
tensor cores need 16-bit inputs, and float32 products would take as long as the rest of a small model. The rounding
changes the gradients by about 0.2 % of their norm, less than rounding the products to bfloat16 does.

    logp(t) = z_t - log Z,   H = log Z - E[z],   z = logits / temperature
    d logp / d z_i = [i = t] - p_i,   d H / d z_i = -p_i (log p_i + H)

Tokens that the server never samples (image tokens) are excluded: their z is a constant far below all others. SGLang
does the same, so that trainer and server have the same distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.data.batch import moved

DEFAULT_CHUNK_SIZE = 512
"""Tokens per chunk: 256 to 1024 take the same time, and memory grows with the chunk."""
_EXCLUDED_SCORE = -1.0e9
"""The z of an excluded token: finite, so that 0 times it is 0, and low enough for probability 0 in every float dtype."""


def token_logprobs_and_entropy(  # noqa: PLR0913 (one keyword for each fact about the output layer)
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    excluded: Sequence[int] = (),
    exact_gradients: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs (in the shape of ``targets``) and entropies [N], float32 (or float64, if the inputs are).

    Args:
        hidden: [N, H]. Its gradient is this rank's summand only: the caller passes it through Megatron's copy or gather
            region, which sums over the group.
        weight: [rows, H], this rank's rows of the output matrix; the same number of rows on every rank of ``group``.
        targets: [N] or [N, m] int64, global token ids, equal on all ranks of the group; so are the results.
        vocab_size: rows beyond this size are padding and ignored.
        temperature: more than 0.
        group: the tensor-parallel group; None if this rank has all rows.
        chunk_size: tokens whose logits exist at the same time.
        excluded: ids with probability 0; log-probs and entropies are over the other tokens.
        exact_gradients: do not round the gradients of the logits to bfloat16.

    Raises:
        ValueError: temperature is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}; score greedy samples at temperature 1")
    return _ChunkedLogprobs.apply(
        hidden, weight, targets, _Head(vocab_size, temperature, group, chunk_size, tuple(excluded), exact_gradients)
    )


@dataclass(frozen=True)
class _Head:
    """Properties of the output layer other than its weight; see the arguments of ``token_logprobs_and_entropy``."""

    vocab_size: int
    temperature: float
    group: dist.ProcessGroup | None
    chunk_size: int
    excluded: tuple[int, ...]
    exact_gradients: bool


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        head: _Head,
    ) -> tuple[Tensor, Tensor]:
        # Without this, a loss without entropy would get a gradient of zeros instead of None and compute the second term.
        ctx.set_materialize_grads(False)
        rank = 0 if head.group is None else head.group.rank()
        first_id = rank * weight.shape[0]
        rows = min(max(head.vocab_size - first_id, 0), weight.shape[0])
        local_targets = (targets if targets.ndim == 2 else targets[:, None]) - first_id
        local = [token - first_id for token in head.excluded if first_id <= token < first_id + rows]
        columns = moved(torch.tensor(local, dtype=torch.int64), hidden.device)
        parts = []
        for start in range(0, hidden.shape[0], head.chunk_size):
            chunk = slice(start, start + head.chunk_size)
            scores = _scores(hidden[chunk], weight[:rows], columns, head.temperature)
            parts.append(_statistics(scores, local_targets[chunk], head.group))
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        # The empty tensor sets the dtype if there are no tokens.
        empty = torch.zeros(local_targets.shape[1] + 2, 0, dtype=dtype, device=hidden.device)
        found = torch.cat([empty, *parts], dim=1)
        logprobs, entropy, log_normalizer = found[2:].t().reshape(targets.shape), found[0], found[1]
        ctx.save_for_backward(hidden, weight, local_targets, log_normalizer, entropy)
        ctx.rows, ctx.columns = rows, columns
        ctx.temperature, ctx.chunk_size = head.temperature, head.chunk_size
        ctx.gradient_dtype = dtype if head.exact_gradients else weight.dtype
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, local_targets, log_normalizer, entropy = ctx.saved_tensors
        rows = ctx.rows
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=log_normalizer.dtype, device=weight.device)
        for start in range(0, hidden.shape[0], ctx.chunk_size):
            chunk = slice(start, start + ctx.chunk_size)
            # In place from here on: these passes over [n, rows] take as long as the products of a small model.
            scores = _scores(hidden[chunk], weight[:rows], ctx.columns, ctx.temperature).sub_(log_normalizer[chunk, None])
            own = None if grad_logprobs is None else grad_logprobs[chunk].reshape(-1, local_targets.shape[1])
            if grad_entropy is None:
                grad_scores = scores.exp_().mul_(0.0 if own is None else -own.sum(1, keepdim=True))
            else:
                p = scores.exp()
                grad_scores = scores.add_(entropy[chunk, None]).mul_(p).mul_(-grad_entropy[chunk, None])
                grad_scores = grad_scores if own is None else grad_scores.sub_(p.mul_(own.sum(1, keepdim=True)))
            if own is not None and rows > 0:
                is_local, column = _columns(local_targets[chunk], rows)
                grad_scores.scatter_add_(1, column, own * is_local)
            grad_scores.index_fill_(1, ctx.columns, 0.0)  # excluded scores are constants, even if one was the target
            grad_scores = _divided(grad_scores, ctx.temperature).to(ctx.gradient_dtype)
            grad_hidden[chunk] = _product(grad_scores, weight[:rows])
            grad_weight[:rows] += _product(grad_scores.t(), hidden[chunk])
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _scores(hidden: Tensor, weight: Tensor, excluded: Tensor, temperature: float) -> Tensor:
    """z [n, rows] of hidden states [n, H], given this rank's ``weight`` [rows, H] and the columns of the tokens without probability."""
    return _divided(_product(hidden, weight.t()), temperature).index_fill_(1, excluded, _EXCLUDED_SCORE)


def _divided(scores: Tensor, temperature: float) -> Tensor:
    return scores if temperature == 1.0 else scores.div_(temperature)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left [n, k] @ right [k, m] -> [n, m] with float32 sums, also for bfloat16 inputs; float64 stays float64."""
    if left.dtype == right.dtype and left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.dtype == right.dtype and left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _columns(local_targets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Flags of the targets among this rank's ``rows``, and a valid column for each target, in the shape of the targets."""
    is_local = (local_targets >= 0) & (local_targets < rows)
    return is_local, local_targets.clamp(0, max(rows - 1, 0))


def _statistics(scores: Tensor, local_targets: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Entropies, log normalizers and m log-probs, [2 + m, n], of scores [n, rows] (overwritten) and local_targets [n, m]."""
    n, rows = scores.shape
    maximum = scores.amax(1) if rows > 0 else scores.new_full((n,), float("-inf"))
    if group is not None and group.size() > 1:
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    # In place, because a second [n, rows] would double the memory of a chunk.
    scores -= maximum[:, None]
    is_local, column = _columns(local_targets, rows)
    target_scores = scores.gather(1, column) if rows > 0 else scores.new_zeros(column.shape)
    weights = scores.exp()
    # One collective for all sums.
    total = weights.sum(1)
    sums = torch.stack([total, weights.mul_(scores).sum(1), *torch.where(is_local, target_scores, 0.0).unbind(1)])
    if group is not None and group.size() > 1:
        dist.all_reduce(sums, group=group)
    total, weighted = sums[:2]
    log_total = total.log()
    return torch.cat([torch.stack([log_total - weighted / total, log_total + maximum]), sums[2:] - log_total])
