"""GAE of packed sequences without a loop over tokens: for GPUs.

For every sequence s and each of its tokens t, from the last one backwards::

    x[t] = delta[t] + decay[s] * x[t + 1],        x[end of s] = 0

The packed axis is cut into slabs (from the right, so that memory stays small), a slab into blocks of ``_BLOCK_TOKENS``
tokens, laid out time-major, so that one vector operation handles the same token of every block:

1. a first sweep over a block's tokens finds what each block yields with nothing coming in from its right;
2. a doubling scan over blocks, in float64, finds what really comes in from the right;
3. a second sweep repeats the recurrence from there and gives the result.

Invariants: work is linear in tokens; the number of kernel launches depends on slabs, not on tokens or sequences; no
number crosses a sequence border, not even as NaN times 0; a coefficient that crosses blocks was rounded once, not once
a token, so float32 results do not drift with the length.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK_TOKENS = 64
_GPU_SLAB_TOKENS = 1 << 26
"""On a GPU launches cost more than cache misses."""
CPU_SLAB_TOKENS = 1 << 20
"""4 MiB a float32 buffer, of which few are alive at a time."""


@dataclass(frozen=True)
class _Border:
    """Sequences whose last token lies in one row of a slab."""

    blocks: Tensor
    """[K] int64: the blocks (columns) where it lies."""
    decays: Tensor
    """[K]: the decay of the sequence that ends there, which holds from this row to the left."""


@dataclass(frozen=True)
class Slab:
    """How tokens [low, high) lie in M blocks, padded on the left."""

    num_blocks: int
    padding: int
    """Empty places before the first token; nothing reads what the recurrence writes there."""
    decay: Tensor
    """[M]: the decay at each block's last token."""
    through: Tensor
    """[M] float64: what of a number right of the block reaches its first token (0 when a sequence ends inside)."""
    borders: dict[int, _Border]
    """By row."""
    max_span: int
    """Blocks that the longest sequence within this slab touches, at most."""


@torch.no_grad()
def advantages_by_blocks(
    rewards: Tensor, values: Tensor, bounds: Tensor, after_end: Tensor, gamma: float, decay: Tensor
) -> Tensor:
    """``A_t = delta_t + decay A_{t+1}`` with ``delta_t = r_t + gamma V(s_{t+1}) - V(s_t)``.

    Args:
        rewards, values: [T] float32 or float64, same dtype and device.
        bounds: [N+1] int64 on the CPU, checked ``cu_seqlens``.
        after_end: [N] V of the state after each sequence's last token, in the dtype and on the device of ``values``;
            not read for empty sequences.
        decay: [N] float64 on the same device, gamma times lambda of each sequence.

    Returns:
        [T] of the same dtype, on the same device.
    """
    occupied = (bounds[1:] > bounds[:-1]).nonzero().squeeze(1)
    ends = bounds[1:][occupied]
    after_end, decays = after_end[occupied.to(values.device)], decay[occupied.to(values.device)]
    result = torch.empty(len(rewards), dtype=rewards.dtype, device=rewards.device)
    carry = torch.zeros(1, dtype=torch.float64, device=values.device)
    step = CPU_SLAB_TOKENS if values.device.type == "cpu" else _GPU_SLAB_TOKENS
    for high in range(len(rewards), 0, -step):
        low = max(0, high - step)
        slab = _plan_slab(low, high, ends, decays, values.dtype)
        deltas = _td_errors(rewards, values, ends, after_end, gamma, low, high)
        carry = _scan_slab(slab, deltas, carry, result[low:high])
    return result


def _td_errors(
    rewards: Tensor, values: Tensor, ends: Tensor, after_end: Tensor, gamma: float, low: int, high: int
) -> Tensor:
    """delta [high - low]; ``ends`` and ``after_end`` [K] are of the sequences that have tokens."""
    # What stands behind the very last token does not matter: a sequence ends there.
    following = torch.cat([values[low + 1 : high + 1], values.new_zeros(1)])[: high - low]
    first, last = torch.searchsorted(ends, torch.tensor([low, high]), right=True).tolist()
    following[(ends[first:last] - 1 - low).to(values.device)] = after_end[first:last]
    return rewards[low:high] + (gamma * following - values[low:high])


def _plan_slab(low: int, high: int, ends: Tensor, decays: Tensor, dtype: torch.dtype) -> Slab:
    """Where the sequence borders lie among the blocks of tokens [low, high).

    ``ends`` [K] int64 on the CPU rises strictly; ``decays`` [K] float64 lies on the device.
    """
    device = decays.device
    num_blocks = -(-(high - low) // _BLOCK_TOKENS)
    padding = num_blocks * _BLOCK_TOKENS - (high - low)
    first = int(torch.searchsorted(ends, low, right=True))
    stop = int(torch.searchsorted(ends, high)) + 1
    ends, decays = ends[first:stop], decays[first:stop]
    inner_ends = torch.nn.functional.pad(ends.clamp(max=high) - low + padding, (1, 0))
    num_blocks_of = (inner_ends // _BLOCK_TOKENS).diff().to(device)

    num_ending = int(torch.searchsorted(ends, high, right=True))
    positions = inner_ends[1 : num_ending + 1] - 1
    blocks = positions // _BLOCK_TOKENS
    through = torch.repeat_interleave(decays**_BLOCK_TOKENS, num_blocks_of, output_size=num_blocks)
    through[blocks.to(device)] = 0.0
    return Slab(
        num_blocks=num_blocks,
        padding=padding,
        decay=torch.repeat_interleave(decays.to(dtype), num_blocks_of, output_size=num_blocks),
        through=through,
        borders=_borders_by_row(positions % _BLOCK_TOKENS, blocks, decays[:num_ending].to(dtype)),
        max_span=int(inner_ends.diff().max()) // _BLOCK_TOKENS + 2,
    )


def _borders_by_row(rows: Tensor, blocks: Tensor, decays: Tensor) -> dict[int, _Border]:
    """Group sequence ends by row: ``rows`` and ``blocks`` [K] on the CPU, ``decays`` [K] on the device."""
    order = rows.argsort(stable=True)
    counts = rows.bincount(minlength=_BLOCK_TOKENS).tolist()
    grouped_blocks = blocks[order].to(decays.device).split(counts)
    grouped_decays = decays[order.to(decays.device)].split(counts)
    return {row: _Border(grouped_blocks[row], grouped_decays[row]) for row in range(_BLOCK_TOKENS) if counts[row] > 0}


def _scan_slab(slab: Slab, inputs: Tensor, carry: Tensor, result: Tensor) -> Tensor:
    """Write the recurrence over one slab into ``result`` [S]; ``carry`` [1] float64 is the number right of it.

    Returns the number at the slab's first token, [1] float64; of no use where the slab is padded, which is the last.
    """
    if slab.padding:
        inputs = torch.nn.functional.pad(inputs, (slab.padding, 0))
    time_major = torch.empty(_BLOCK_TOKENS, slab.num_blocks, dtype=result.dtype, device=result.device)
    time_major.copy_(inputs.view(slab.num_blocks, _BLOCK_TOKENS).t())
    rows = list(time_major.unbind(0))
    alone = sweep(rows, slab, torch.zeros_like(slab.decay), in_place=False)
    firsts = _scan_blocks(alone.double(), slab.through, carry, slab.max_span)
    sweep(rows, slab, torch.cat([firsts[1:], carry]).to(result.dtype), in_place=True)
    if slab.padding:
        result.copy_(time_major.t().reshape(-1)[slab.padding :])
    else:
        result.view(slab.num_blocks, _BLOCK_TOKENS).copy_(time_major.t())
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


def _scan_blocks(alone: Tensor, through: Tensor, carry: Tensor, max_span: int) -> Tensor:
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
