"""Gated DeltaNet (arXiv 2412.06464) on a CPU: stand-ins for the kernels of flash-linear-attention, which need a GPU.

Sequences are packed: rows [1, T, ...], sequence i has the rows ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``. Nothing passes from
one sequence to another. Autograd computes the gradients.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK_TOKENS = 64


def l2norm(rows: Tensor, eps: float = 1e-6) -> Tensor:
    """Rows [..., d] of length 1."""
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + eps)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Convolve each channel with its own kernel over a token and the ones before it: x [1, T, D], weight [D, W] -> [1, T, D]."""
    rows = x[0]
    bounds = _bounds(cu_seqlens, len(rows))
    position = torch.arange(len(rows)) - bounds[:-1].repeat_interleave(bounds.diff())
    out = rows * weight[:, -1] + (0 if bias is None else bias)
    for lag in range(1, weight.shape[1]):
        earlier = torch.cat([rows.new_zeros(lag, rows.shape[1]), rows])[: len(rows)]
        out = out + earlier.masked_fill((position < lag)[:, None], 0) * weight[:, -1 - lag]
    return (F.silu(out) if activation in ("silu", "swish") else out)[None], None


def chunk_gated_delta_rule(  # noqa: PLR0913 (flash-linear-attention has these)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule of N packed sequences, in chunks: the tokens of a chunk at once, and one chunk after another.

    A state S [K, V] per head starts at 0 or ``initial_state`` [N, H, K, V]; each token of the head's sequence changes it to
    exp(g) S + beta k (v - exp(g) k S), and reads the output q S from it.

    Args:
        q, k: [1, T, H, K]; q is multiplied by ``scale``, 1 / sqrt(K) if None.
        v: [1, T, H, V].
        g, beta: [1, T, H]; log of the decay, and the step of the update.
        scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens: as in flash-linear-attention.

    Returns:
        Outputs [1, T, H, V], and the states after the last tokens [N, H, K, V] float32 if ``output_final_state``.
    """
    dtype, wide = v.dtype, torch.promote_types(v.dtype, torch.float32)
    bounds = _bounds(cu_seqlens, q.shape[1])
    rows, active, order = _chunks(bounds.diff(), bounds[:-1])
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q.to(wide)), l2norm(k.to(wide))

    def chunked(tensor: Tensor) -> Tensor:
        """[1, T, H, ...] -> [chunks, H, tokens of a chunk, ...]; padding is 0, which changes no state."""
        padded = torch.cat([tensor[0].to(wide), tensor.new_zeros(1, *tensor.shape[2:], dtype=wide)])
        return padded[rows].transpose(1, 2)

    q, k, v, g, beta = (chunked(tensor) for tensor in (q, k, v, g, beta))
    q, g, beta = q * (scale or q.shape[-1] ** -0.5), g.cumsum(-1), beta[..., None]
    # Decay from token j to token i of a chunk, 0 for later tokens j.
    later = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool).triu(1)
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(later, -torch.inf).exp()
    # Each token's update sees the updates of the tokens before: a triangular system (the WY form).
    system = k * beta @ k.mT * decay
    right = torch.cat([v * beta, k * beta * g[..., None].exp()], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], -1)
    inside = q @ k.mT * decay
    q, k, last = q * g[..., None].exp(), k * (g[..., -1:] - g)[..., None].exp(), g[..., -1, None, None].exp()
    state = k.new_zeros(len(order), *k.shape[1:2], k.shape[-1], v.shape[-1])
    if initial_state is not None:
        state = initial_state.to(wide)[order]
    outputs, states = _scan(active, state, [values, keys, inside, q, k, last])
    result = outputs.transpose(1, 2).flatten(0, 1)[rows.flatten().argsort()[: int(bounds[-1])]]
    return result[None].to(dtype), states[order.argsort()].float() if output_final_state else None


def _scan(active: list[int], state: Tensor, chunked: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs [chunks, H, tokens, V] of one chunk after another, and the last states of all sequences [N, H, K, V].

    ``active``: numbers of chunks that run at once, for the first sequences of ``state``. ``chunked``: values, keys, the
    attention inside a chunk, queries, decayed keys and the decay of a whole chunk, each [chunks, ...].
    """
    outputs, ended = [], []
    for values, keys, inside, q, k, last in zip(*(tensor.split(active) for tensor in chunked), strict=True):
        ended.append(state[len(values) :])
        state = state[: len(values)]
        update = values - keys @ state
        outputs.append(q @ state + inside @ update)
        state = state * last + k.mT @ update
    return torch.cat(outputs), torch.cat([state, *reversed(ended)])


def _bounds(cu_seqlens: Tensor | None, num_rows: int) -> Tensor:
    return torch.tensor([0, num_rows]) if cu_seqlens is None else cu_seqlens.long()


def _chunks(lengths: Tensor, starts: Tensor) -> tuple[Tensor, list[int], Tensor]:
    """Chunks of packed sequences: all first chunks, then all second chunks, each time the longest sequence's first.

    Returns:
        Rows of the pack [chunks, tokens], T for padding; the number of sequences with an n-th chunk for each n; and the
        indices of all sequences, the longest first.
    """
    size, total = min(_CHUNK_TOKENS, max(int(lengths.max()), 1)), int(lengths.sum())
    order = lengths.argsort(descending=True, stable=True)
    counts = -(-lengths[order] // size)
    active = [int((counts > index).sum()) for index in range(int(counts.max()))]
    offsets = torch.arange(size)
    rows = []
    for index, count in enumerate(active):
        position, own = index * size + offsets, order[:count, None]
        rows.append(torch.where(position < lengths[own], starts[own] + position, total))
    return torch.cat(rows), active, order


KERNELS = {"l2norm": l2norm, "causal_conv1d": causal_conv1d, "chunk_gated_delta_rule": chunk_gated_delta_rule}
"""Names of the kernels where Megatron imports them."""
