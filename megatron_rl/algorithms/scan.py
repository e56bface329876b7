"""A reverse linear recurrence over packed sequences, without a loop over tokens.

For every sequence s and each of its tokens t, from the last one backwards::

    x[t] = inputs[t] + decay[s] * x[t + 1],        x[end of s] = 0

GAE, EGAE and discounted returns are this recurrence. The packed axis is cut into slabs (from the right, so memory stays
small and a slab fits the processor's cache), a slab into blocks of ``BLOCK_TOKENS`` tokens, laid out time-major, so
that one vector instruction stream handles one token of every block:

1. a first sweep over the block's tokens finds what each block yields with nothing coming in from its right;
2. a doubling scan over blocks, in float64, finds what really comes in from the right;
3. a second sweep repeats the recurrence from there and writes the result.

Invariants: work is linear in tokens; the number of kernel launches depends on slabs, not on tokens or sequences; no
number crosses a sequence border, not even as NaN times 0; a coefficient that crosses blocks was rounded once, not once
a token, so float32 results do not drift with the length.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_TOKENS = 64
CPU_SLAB_TOKENS = 1 << 20
"""About 4 MiB a float32 buffer: a handful of them stay in a last-level cache."""
GPU_SLAB_TOKENS = 1 << 26
"""On a GPU launches cost more than cache misses."""


@dataclass(frozen=True)
class Border:
    """Sequences whose last token lies in one row of a slab."""

    blocks: Tensor
    """[K] int64: the blocks (columns) where it lies."""
    decays: Tensor
    """[K]: the decay of the sequence that ends there, which holds from this row to the left."""


@dataclass(frozen=True)
class Slab:
    """Tokens [low, high) as blocks in time-major layout, padded on the left."""

    num_blocks: int
    padding: int
    """Empty places before the first token; nothing reads what the recurrence writes there."""
    decay: Tensor
    """[M]: the decay at each block's last token."""
    through: Tensor
    """[M] float64: what of a number right of the block reaches its first token (0 when a sequence ends inside)."""
    borders: dict[int, Border]
    """By row."""
    max_span: int
    """Blocks that the longest sequence within this slab touches, at most."""


def reverse_scan(
    inputs: Callable[[int, int], Tensor],
    decay: Tensor,
    bounds: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device,
    slab_tokens: int | None = None,
) -> Tensor:
    """Solve the recurrence of the module docstring for all sequences.

    Args:
        inputs: called as ``inputs(low, high)``, gives a new or own tensor [high - low] of the tokens low..high-1; it is
            not changed here.
        decay: [N] float64 on ``device``, one factor a sequence.
        bounds: [N+1] int64 on the CPU, checked ``cu_seqlens``.
        slab_tokens: tokens worked on at a time, a multiple of ``BLOCK_TOKENS``; None chooses by device.

    Returns:
        [T] of ``dtype`` on ``device``.
    """
    num_tokens = int(bounds[-1])
    occupied = (bounds[1:] > bounds[:-1]).nonzero().squeeze(1)
    ends = bounds[1:][occupied]
    decay = decay[occupied.to(device)]
    result = torch.empty(num_tokens, dtype=dtype, device=device)
    carry = torch.zeros(1, dtype=torch.float64, device=device)
    step = slab_tokens or (CPU_SLAB_TOKENS if device.type == "cpu" else GPU_SLAB_TOKENS)
    for high in range(num_tokens, 0, -step):
        low = max(0, high - step)
        slab = plan_slab(low, high, ends, decay, dtype)
        carry = scan_slab(slab, inputs(low, high), carry, result[low:high])
    return result


def plan_slab(low: int, high: int, ends: Tensor, decay: Tensor, dtype: torch.dtype) -> Slab:
    """Where the sequence borders lie among the blocks of tokens [low, high).

    ``ends`` [K] int64 on the CPU rises strictly; ``decay`` [K] float64 lies on the device.
    """
    num_blocks = -(-(high - low) // BLOCK_TOKENS)
    padding = num_blocks * BLOCK_TOKENS - (high - low)
    first = int(torch.searchsorted(ends, low, right=True))
    stop = int(torch.searchsorted(ends, high)) + 1
    ends, decay = ends[first:stop], decay[first:stop]
    inner_ends = ends.clamp(max=high) - low + padding
    blocks_before = torch.nn.functional.pad(inner_ends // BLOCK_TOKENS, (1, 0))
    block_decay = torch.repeat_interleave(
        decay, blocks_before.diff().to(decay.device), output_size=num_blocks
    )
    ending = (ends <= high).nonzero().squeeze(1)
    positions = inner_ends[ending] - 1
    blocks = positions // BLOCK_TOKENS
    through = block_decay**BLOCK_TOKENS
    through[blocks.to(decay.device)] = 0.0
    longest = int(torch.nn.functional.pad(inner_ends, (1, 0)).diff().max())
    return Slab(
        num_blocks=num_blocks,
        padding=padding,
        decay=block_decay.to(dtype),
        through=through,
        borders=borders_by_row(positions % BLOCK_TOKENS, blocks, decay[ending.to(decay.device)].to(dtype)),
        max_span=longest // BLOCK_TOKENS + 2,
    )


def borders_by_row(rows: Tensor, blocks: Tensor, decays: Tensor) -> dict[int, Border]:
    """Group sequence ends by row: ``rows`` and ``blocks`` [K] on the CPU, ``decays`` [K] on the device."""
    order = rows.argsort(stable=True)
    counts = rows.bincount(minlength=BLOCK_TOKENS).tolist()
    grouped_blocks = blocks[order].to(decays.device).split(counts)
    grouped_decays = decays[order.to(decays.device)].split(counts)
    return {
        row: Border(grouped_blocks[row], grouped_decays[row]) for row in range(BLOCK_TOKENS) if counts[row] > 0
    }


def scan_slab(slab: Slab, inputs: Tensor, carry: Tensor, result: Tensor) -> Tensor:
    """Write the recurrence over one slab into ``result`` [S]; ``carry`` [1] float64 is the number right of it.

    Returns the number at the slab's first token, [1] float64.
    """
    if slab.padding:
        inputs = torch.nn.functional.pad(inputs, (slab.padding, 0))
    time_major = torch.empty(BLOCK_TOKENS, slab.num_blocks, dtype=result.dtype, device=result.device)
    time_major.copy_(inputs.view(slab.num_blocks, BLOCK_TOKENS).t())
    rows = list(time_major.unbind(0))
    nothing = torch.zeros(slab.num_blocks, dtype=result.dtype, device=result.device)
    alone = sweep(rows, slab, nothing, in_place=False)
    firsts = scan_blocks(alone.double(), slab.through, carry, slab.max_span)
    incoming = torch.cat([firsts[1:], carry]).to(result.dtype)
    sweep(rows, slab, incoming, in_place=True)
    if slab.padding:
        result.copy_(time_major.t().reshape(-1)[slab.padding :])
        return result[:1].double()
    result.view(slab.num_blocks, BLOCK_TOKENS).copy_(time_major.t())
    return firsts[:1]


def sweep(rows: list[Tensor], slab: Slab, incoming: Tensor, *, in_place: bool) -> Tensor:
    """Run the recurrence through a slab's rows, last one first; returns the first row's result [M].

    ``in_place`` overwrites the rows with the results; otherwise they stay as they are.
    """
    decay = slab.decay.clone()
    following = incoming
    accumulator = torch.empty_like(incoming)
    for index in reversed(range(len(rows))):
        row = rows[index]
        target = row if in_place else accumulator
        border = slab.borders.get(index)
        if border is None:
            torch.addcmul(row, decay, following, out=target)
        else:
            # The last token of a sequence takes nothing from its right: put its input back.
            unmixed = row.index_select(0, border.blocks)
            decay.index_copy_(0, border.blocks, border.decays)
            torch.addcmul(row, decay, following, out=target)
            target.index_copy_(0, border.blocks, unmixed)
        following = target
    return following


def scan_blocks(alone: Tensor, through: Tensor, carry: Tensor, max_span: int) -> Tensor:
    """Solve ``x[b] = alone[b] + through[b] * x[b + 1]`` with ``x[M] = carry`` by doubling; all float64 [M].

    Nothing passes where ``through`` is 0, and nothing passes further than ``max_span`` blocks.
    """
    totals = torch.cat([alone, carry])
    open_to = torch.cat([through, torch.zeros_like(carry)])
    distance = 1
    while distance < min(len(totals), max_span):
        left = slice(None, -distance)
        right = slice(distance, None)
        mixed = torch.addcmul(totals[left], open_to[left], totals[right])
        totals[left] = torch.where(open_to[left] == 0, totals[left], mixed)
        open_to[left] = open_to[left] * open_to[right]
        distance *= 2
    return totals[:-1]
