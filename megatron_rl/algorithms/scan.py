"""A reverse linear recurrence over packed sequences, without a loop over tokens.

For every sequence s and each of its tokens t, from the last one backwards::

    x[t] = inputs[t] + decay[s] * x[t + 1],        x[end of s] = 0

GAE, EGAE and discounted returns are this recurrence. The packed axis is cut into slabs (from the right, so memory stays
small and a slab fits the processor's cache), a slab into blocks of ``BLOCK_TOKENS`` tokens:

1. find what each block yields with nothing coming in from its right;
2. a doubling scan over blocks, in float64, finds what really comes in from the right;
3. solve each block again from there and write the result.

Blocks are solved by one of two means. The sweep lays blocks out time-major and repeats the recurrence, one vector
instruction stream for the same token of every block; it takes any decay and sequence borders anywhere. Where a whole
call has one decay, blocks without a border are one matrix product with the powers of that decay, and only blocks with a
border are swept. On a GPU all blocks are swept: there launches count, and a matrix product may run in TF32.

Invariants: work is linear in tokens; the number of kernel launches depends on slabs, not on tokens or sequences; no
number crosses a sequence border, not even as NaN times 0; a coefficient that crosses blocks was rounded once, not once
a token, so float32 results do not drift with the length.
"""

import mmap
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_TOKENS = 32
CPU_SLAB_TOKENS = 1 << 19
"""2 MiB a float32 buffer: a handful of them stay in a last-level cache."""
GPU_SLAB_TOKENS = 1 << 26
"""On a GPU launches cost more than cache misses."""
MAX_BORDER_SHARE = 0.25
"""With more blocks than this holding a border, sweeping all of a slab is cheaper than picking them out."""
HUGE_PAGE_RESULT_BYTES = 32 << 20
"""The C allocator hands larger buffers back to the system at once, so each one is made of fresh pages."""


@dataclass(frozen=True)
class Border:
    """Sequences whose last token lies in one row of the swept blocks."""

    columns: Tensor
    """[K] int64: which of the swept blocks."""
    decays: Tensor
    """[K]: the decay of the sequence that ends there, which holds from this row to the left."""


@dataclass(frozen=True)
class Slab:
    """How tokens [low, high) lie in M blocks, padded on the left."""

    num_blocks: int
    padding: int
    """Empty places before the first token; nothing reads what the recurrence writes there."""
    through: Tensor
    """[M] float64: what of a number right of the block reaches its first token (0 when a sequence ends inside)."""
    swept: Tensor | None
    """[m] int64: blocks to sweep, the others are matrix products; None: sweep them all."""
    decay: Tensor
    """[m]: the decay at the last token of each swept block."""
    borders: dict[int, Border]
    """By row."""
    max_span: int
    """Blocks that the longest sequence within this slab touches, at most."""


def reverse_scan(
    inputs: Callable[[int, int], Tensor],
    decay: float | Tensor,
    bounds: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Solve the recurrence of the module docstring for all sequences.

    Args:
        inputs: called as ``inputs(low, high)``, gives a new tensor [high - low] of the tokens low..high-1.
        decay: one factor, or [N] float64 on ``device`` with one for each sequence.
        bounds: [N+1] int64 on the CPU, checked ``cu_seqlens``.

    Returns:
        [T] of ``dtype`` on ``device``.
    """
    num_tokens = int(bounds[-1])
    occupied = (bounds[1:] > bounds[:-1]).nonzero().squeeze(1)
    ends = bounds[1:][occupied]
    powers = None
    if isinstance(decay, Tensor):
        decays = decay[occupied.to(device)]
    else:
        decays = torch.full((len(ends),), decay, dtype=torch.float64, device=device)
        # A user who lowers the precision of matrix products does not mean the advantages.
        if device.type == "cpu" and torch.get_float32_matmul_precision() == "highest":
            powers = decay_powers(decay, dtype)
    result = empty_result(num_tokens, dtype, device)
    carry = torch.zeros(1, dtype=torch.float64, device=device)
    step = CPU_SLAB_TOKENS if device.type == "cpu" else GPU_SLAB_TOKENS
    for high in range(num_tokens, 0, -step):
        low = max(0, high - step)
        slab = plan_slab(low, high, ends, decays, dtype, may_multiply=powers is not None)
        carry = scan_slab(slab, inputs(low, high), carry, powers, result[low:high])
    return result


def empty_result(num_tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised [T], a large one on a Linux CPU in huge pages: small page faults cost more than the arithmetic."""
    size = num_tokens * dtype.itemsize
    if device.type != "cpu" or size < HUGE_PAGE_RESULT_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_tokens, dtype=dtype, device=device)
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        region.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        # A kernel built without huge pages: ordinary ones do.
        return torch.empty(num_tokens, dtype=dtype)
    return torch.frombuffer(region, dtype=dtype)


def decay_powers(decay: float, dtype: torch.dtype) -> Tensor:
    """[B, B]: entry (k, t) is ``decay^(k - t)`` for k >= t, else 0; ``inputs @ powers`` solves a block on its own."""
    tokens = torch.arange(BLOCK_TOKENS, dtype=torch.float64)
    distance = tokens[:, None] - tokens[None, :]
    return torch.where(distance >= 0, decay ** distance.clamp(min=0), 0.0).to(dtype)


def plan_slab(
    low: int, high: int, ends: Tensor, decays: Tensor, dtype: torch.dtype, *, may_multiply: bool
) -> Slab:
    """Where the sequence borders lie among the blocks of tokens [low, high).

    ``ends`` [K] int64 on the CPU rises strictly; ``decays`` [K] float64 lies on the device. ``may_multiply`` allows
    matrix products for blocks without a border.
    """
    device = decays.device
    num_blocks = -(-(high - low) // BLOCK_TOKENS)
    padding = num_blocks * BLOCK_TOKENS - (high - low)
    first = int(torch.searchsorted(ends, low, right=True))
    stop = int(torch.searchsorted(ends, high)) + 1
    ends, decays = ends[first:stop], decays[first:stop]
    inner_ends = torch.nn.functional.pad(ends.clamp(max=high) - low + padding, (1, 0))
    num_blocks_of = (inner_ends // BLOCK_TOKENS).diff().to(device)
    block_decay = torch.repeat_interleave(decays, num_blocks_of, output_size=num_blocks)

    num_ending = int(torch.searchsorted(ends, high, right=True))
    positions = inner_ends[1 : num_ending + 1] - 1
    columns = positions // BLOCK_TOKENS
    through = block_decay**BLOCK_TOKENS
    through[columns.to(device)] = 0.0
    swept = None
    if may_multiply:
        with_border, column_of = columns.unique_consecutive(return_inverse=True)
        if len(with_border) <= MAX_BORDER_SHARE * num_blocks:
            swept, columns = with_border.to(device), column_of
            block_decay = block_decay[swept]
    return Slab(
        num_blocks=num_blocks,
        padding=padding,
        through=through,
        swept=swept,
        decay=block_decay.to(dtype),
        borders=borders_by_row(positions % BLOCK_TOKENS, columns, decays[:num_ending].to(dtype)),
        max_span=int(inner_ends.diff().max()) // BLOCK_TOKENS + 2,
    )


def borders_by_row(rows: Tensor, columns: Tensor, decays: Tensor) -> dict[int, Border]:
    """Group sequence ends by row: ``rows`` and ``columns`` [K] on the CPU, ``decays`` [K] on the device."""
    order = rows.argsort(stable=True)
    counts = rows.bincount(minlength=BLOCK_TOKENS).tolist()
    grouped_columns = columns[order].to(decays.device).split(counts)
    grouped_decays = decays[order.to(decays.device)].split(counts)
    return {
        row: Border(grouped_columns[row], grouped_decays[row]) for row in range(BLOCK_TOKENS) if counts[row] > 0
    }


def scan_slab(slab: Slab, inputs: Tensor, carry: Tensor, powers: Tensor | None, result: Tensor) -> Tensor:
    """Write the recurrence over one slab into ``result`` [S]; ``inputs`` [S] is used up.

    ``carry`` [1] float64 is the number right of the slab; returns the number at its first token, alike. ``powers``
    [B, B] as by ``decay_powers`` where the plan multiplies.
    """
    if slab.padding:
        inputs = torch.nn.functional.pad(inputs, (slab.padding, 0))
    blocks = inputs.view(slab.num_blocks, BLOCK_TOKENS)
    swept = blocks if slab.swept is None else blocks[slab.swept]
    time_major = torch.empty(BLOCK_TOKENS, len(swept), dtype=result.dtype, device=result.device)
    rows = list(time_major.copy_(swept.t()).unbind(0))
    alone = sweep(rows, slab, torch.zeros_like(slab.decay), in_place=False)
    if slab.swept is not None:
        alone = torch.mv(blocks, powers[:, 0]).index_copy_(0, slab.swept, alone)
    firsts = scan_blocks(alone.double(), slab.through, carry, slab.max_span)
    incoming = torch.cat([firsts[1:], carry]).to(result.dtype)

    solved = torch.empty_like(blocks) if slab.padding else result.view(slab.num_blocks, BLOCK_TOKENS)
    if slab.swept is None:
        sweep(rows, slab, incoming, in_place=True)
        solved.copy_(time_major.t())
    else:
        sweep(rows, slab, incoming[slab.swept], in_place=True)
        blocks[:, -1].addcmul_(incoming, powers[1, 0])
        torch.mm(blocks, powers, out=solved)
        solved.index_copy_(0, slab.swept, time_major.t())
    if slab.padding:
        result.copy_(solved.view(-1)[slab.padding :])
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
            unmixed = row.index_select(0, border.columns)
            decay.index_copy_(0, border.columns, border.decays)
            torch.addcmul(row, decay, following, out=target)
            target.index_copy_(0, border.columns, unmixed)
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
