"""Trajectories as packed batches: prompts and responses back to back, and arrays over their tokens. Pure."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_rl.data.batch import ROUTES, TOKENS, PackedBatch, Parts, cu_seqlens_of
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.data.vision import Vision

_SHORT_STRETCH = 32
"""Tokens, on average: shorter ones take longer to copy one by one than by a list of all their tokens."""


def pack(trajectories: Sequence[Trajectory], fields: dict[str, Tensor], vision: Vision | None = None) -> PackedBatch:
    """Prompts and responses so far with per-token ``fields`` [T]; ``vision`` finds the images of the prompts.

    Tokens stay where they are (``PackedBatch.parts``), and images are files (``Images.sources``).
    """
    lengths = torch.tensor([t.num_tokens for t in trajectories], dtype=torch.int64)
    images = None if vision is None else vision.batch([t.prompt.images for t in trajectories])
    parts = {TOKENS: Parts([t.token_parts() for t in trajectories])} if trajectories else {}
    tokens = torch.empty(int(lengths.sum()), dtype=torch.int64, device="meta" if trajectories else "cpu")
    return PackedBatch(tokens, cu_seqlens_of(lengths), fields, images, tuple(t.id for t in trajectories), parts)


def window_batch(
    trajectories: Sequence[Trajectory], step: int | None, vision: Vision | None = None
) -> PackedBatch:
    """Prompt and response so far; ``mask`` is on the tokens that ``step`` generated, rollout_logprobs next to it.

    ``step`` None: on all that the model generated.

    Every window of a response needs the prompt's images again.
    """
    num_tokens = sum(t.num_tokens for t in trajectories)
    mask, logprobs = np.zeros(num_tokens, bool), np.zeros(num_tokens, np.float32)
    end = 0
    for trajectory in trajectories:
        end += len(trajectory.prompt.token_ids)
        for segment in trajectory.segments:
            start, end = end, end + len(segment.token_ids)
            if segment.generated and step in (None, segment.step):
                mask[start:end], logprobs[start:end] = True, segment.rollout_logprobs
    fields = {"mask": torch.from_numpy(mask), "rollout_logprobs": torch.from_numpy(logprobs)}
    return pack(trajectories, fields, vision)


def window_routes(trajectories: Sequence[Trajectory], step: int) -> Parts | None:
    """[layers, k] int16 of each token: the experts that the engine chose in ``step`` (``data.batch.ROUTES``), 0 where it
    said nothing.

    None when no trajectory has a record of this step.
    """
    records = [t.routes.routes if t.routes is not None and t.routes.step == step else None for t in trajectories]
    shapes = {record.shape[1:] for record in records if record is not None}
    if not shapes:
        return None
    (shape,) = shapes
    rows = []
    for trajectory, record in zip(trajectories, records, strict=True):
        known = [] if record is None else [record]
        rows.append([*known, np.zeros((trajectory.num_tokens - sum(map(len, known)), *shape), dtype=np.int16)])
    return Parts(rows)


def with_routes(batch: PackedBatch, routes: Parts | None) -> PackedBatch:
    """The batch with the experts that the policy's passes over it are to follow; None: it chooses by itself."""
    return batch if routes is None else replace(batch, parts={**batch.parts, ROUTES: routes})


def response_field(parts: Sequence[np.ndarray], trajectories: Sequence[Trajectory], dtype: type = np.float32) -> Tensor:
    """[T]: one array over each response's tokens, zeros on the prompts."""
    rows: list[np.ndarray] = [np.zeros(0, dtype)]  # so that no trajectory at all is an empty field
    for part, trajectory in zip(parts, trajectories, strict=True):
        rows += [np.zeros(len(trajectory.prompt.token_ids), dtype), part.astype(dtype, copy=False)]
    return torch.from_numpy(np.concatenate(rows))


def on_mask(values: Tensor, mask: Tensor) -> Tensor:
    """[T]: ``values`` [number of True in mask] where ``mask`` [T] is on, 0 elsewhere."""
    found, start = torch.zeros(len(mask), dtype=values.dtype), 0
    if (stretches := _stretches(mask)) is None:
        # One pass; putting at the places of a mask first makes a list of them.
        return found.masked_scatter_(mask, values)
    to, of = found.numpy(), values.numpy()
    for first, end in stretches:
        to[first:end] = of[start : start + end - first]
        start += end - first
    return found


def within(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` [T] where ``mask`` [T] is on: the inverse of ``on_mask``."""
    if (stretches := _stretches(mask)) is None:
        return values[mask]
    of = values.numpy()
    return torch.from_numpy(np.concatenate([of[:0], *(of[first:end] for first, end in stretches)]))


def borders_within(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N+1] int64: where each sequence starts in what ``within`` gives."""
    return torch.searchsorted(torch.from_numpy(np.flatnonzero(mask.numpy())), cu_seqlens)


def _stretches(mask: Tensor) -> list[tuple[int, int]] | None:
    """First and end of each run of True in a window's mask; None where these are so many that nothing is gained by them."""
    flags = mask.numpy()
    edges = np.flatnonzero(flags[1:] != flags[:-1]) + 1
    if len(edges) * _SHORT_STRETCH > len(flags):
        return None
    on_first = bool(len(flags)) and bool(flags[0])
    edges = np.concatenate([np.zeros(int(on_first), np.int64), edges, np.full((len(edges) + on_first) % 2, len(flags))])
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
