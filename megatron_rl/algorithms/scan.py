"""A reverse linear recurrence over packed sequences, without a loop over tokens.

For every sequence s and each of its tokens t, from the last one backwards::

    x[t] = inputs[t] + decay[s] * x[t + 1],        x[end of s] = 0

GAE, EGAE and discounted returns are this recurrence. The packed axis is cut into slabs (from the right, so memory stays
small and a slab fits the processor's cache), a slab into blocks of ``BLOCK_TOKENS`` tokens, laid out time-major, so
that one vector operation handles the same token of every block:

1. a first sweep over a block's tokens finds what each block yields with nothing coming in from its right;
2. a doubling scan over blocks, in float64, finds what really comes in from the right;
3. a second sweep repeats the recurrence from there and gives the result.

Invariants: work is linear in tokens; the number of kernel launches depends on slabs, not on tokens or sequences; no
number crosses a sequence border, not even as NaN times 0; a coefficient that crosses blocks was rounded once, not once
a token, so float32 results do not drift with the length.

Threads: on a CPU a large batch is shared among as many threads as torch may use, each with sequences of its own, and
the caller waits for all of them. Every operation stays below the size at which torch itself would fork, so that threads
never multiply and a busy core delays no barrier.
"""

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_TOKENS = 64
CPU_SLAB_TOKENS = 1 << 20
"""4 MiB a float32 buffer, of which few are alive at a time; its rows of 2^14 run on the thread that asks."""
GPU_SLAB_TOKENS = 1 << 26
"""On a GPU launches cost more than cache misses."""
UNFORKED_TOKENS = 1 << 15
"""Element-wise operations up to this size (torch's grain size) run on the thread that asks."""
HUGE_PAGE_BYTES = 32 << 20
"""The C allocator hands larger buffers back to the system at once, so each one is made of fresh pages."""


@dataclass(frozen=True)
class Border:
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
    borders: dict[int, Border]
    """By row."""
    max_span: int
    """Blocks that the longest sequence within this slab touches, at most."""


@torch.no_grad()
def reverse_scan(
    inputs: Callable[[int, int], Tensor],
    decay: Tensor,
    bounds: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Solve the recurrence of the module docstring for all sequences.

    Args:
        inputs: called as ``inputs(low, high)``, from several threads, gives [high - low] of the tokens low..high-1.
        decay: [N] float64 on ``device``, one factor a sequence.
        bounds: [N+1] int64 on the CPU, checked ``cu_seqlens``.

    Returns:
        [T] of ``dtype`` on ``device``.
    """
    num_tokens = int(bounds[-1])
    occupied = (bounds[1:] > bounds[:-1]).nonzero().squeeze(1)
    ends = bounds[1:][occupied]
    decays = decay[occupied.to(device)]
    result = empty_result(num_tokens, dtype, device)

    def scan_span(span: tuple[int, int]) -> None:
        scan_slabs(span, inputs, ends, decays, result)

    spans = independent_spans(ends, num_tokens) if device.type == "cpu" else [(0, num_tokens)]
    if len(spans) == 1:
        scan_span(spans[0])
    else:
        with ThreadPoolExecutor(len(spans), thread_name_prefix="reverse_scan") as pool:
            list(pool.map(scan_span, spans))
    return result


def empty_result(num_tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised [T]; a large one on a Linux CPU in huge pages, as small page faults cost more than the scan."""
    size = num_tokens * dtype.itemsize
    if device.type != "cpu" or size < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_tokens, dtype=dtype, device=device)
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        region.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        # A kernel built without huge pages: ordinary ones do.
        return torch.empty(num_tokens, dtype=dtype)
    return torch.frombuffer(region, dtype=dtype)


def independent_spans(ends: Tensor, num_tokens: int) -> list[tuple[int, int]]:
    """Token ranges of whole sequences, about equal, one a thread; a small batch stays in one piece.

    ``ends`` [K] int64 rises strictly.
    """
    num_threads = max(1, min(torch.get_num_threads(), num_tokens // (2 * CPU_SLAB_TOKENS)))
    shares = torch.tensor([num_tokens * thread // num_threads for thread in range(1, num_threads)], dtype=torch.int64)
    cuts = ends[torch.searchsorted(ends, shares)].tolist() if len(shares) else []
    corners = sorted({0, *cuts, num_tokens})
    return list(zip(corners, corners[1:])) or [(0, 0)]


@torch.no_grad()  # A thread starts with gradients on, whatever its parent had.
def scan_slabs(
    span: tuple[int, int], inputs: Callable[[int, int], Tensor], ends: Tensor, decays: Tensor, result: Tensor
) -> None:
    """Solve the recurrence for the tokens of one span of whole sequences, into ``result`` [T]."""
    carry = torch.zeros(1, dtype=torch.float64, device=result.device)
    step = CPU_SLAB_TOKENS if result.device.type == "cpu" else GPU_SLAB_TOKENS
    for high in range(span[1], span[0], -step):
        low = max(span[0], high - step)
        slab = plan_slab(low, high, ends, decays, result.dtype)
        carry = scan_slab(slab, inputs(low, high), carry, result[low:high])


def plan_slab(low: int, high: int, ends: Tensor, decays: Tensor, dtype: torch.dtype) -> Slab:
    """Where the sequence borders lie among the blocks of tokens [low, high).

    ``ends`` [K] int64 on the CPU rises strictly; ``decays`` [K] float64 lies on the device.
    """
    device = decays.device
    num_blocks = -(-(high - low) // BLOCK_TOKENS)
    padding = num_blocks * BLOCK_TOKENS - (high - low)
    first = int(torch.searchsorted(ends, low, right=True))
    stop = int(torch.searchsorted(ends, high)) + 1
    ends, decays = ends[first:stop], decays[first:stop]
    inner_ends = torch.nn.functional.pad(ends.clamp(max=high) - low + padding, (1, 0))
    num_blocks_of = (inner_ends // BLOCK_TOKENS).diff().to(device)

    num_ending = int(torch.searchsorted(ends, high, right=True))
    positions = inner_ends[1 : num_ending + 1] - 1
    blocks = positions // BLOCK_TOKENS
    through = torch.repeat_interleave(decays**BLOCK_TOKENS, num_blocks_of, output_size=num_blocks)
    through[blocks.to(device)] = 0.0
    return Slab(
        num_blocks=num_blocks,
        padding=padding,
        decay=torch.repeat_interleave(decays.to(dtype), num_blocks_of, output_size=num_blocks),
        through=through,
        borders=borders_by_row(positions % BLOCK_TOKENS, blocks, decays[:num_ending].to(dtype)),
        max_span=int(inner_ends.diff().max()) // BLOCK_TOKENS + 2,
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

    Returns the number at the slab's first token, [1] float64; of no use where the slab is padded, which is the last.
    """
    if slab.padding:
        inputs = torch.nn.functional.pad(inputs, (slab.padding, 0))
    time_major = torch.empty(BLOCK_TOKENS, slab.num_blocks, dtype=result.dtype, device=result.device)
    time_major.copy_(inputs.view(slab.num_blocks, BLOCK_TOKENS).t())
    rows = list(time_major.unbind(0))
    alone = sweep(rows, slab, torch.zeros_like(slab.decay), in_place=False)
    firsts = scan_blocks(alone.double(), slab.through, carry, slab.max_span)
    sweep(rows, slab, torch.cat([firsts[1:], carry]).to(result.dtype), in_place=True)
    if slab.padding:
        result.copy_(time_major.t().reshape(-1)[slab.padding :])
    else:
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
