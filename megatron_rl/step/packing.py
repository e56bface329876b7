"""Packs trajectories into batches: prompts and responses concatenated, with arrays over their tokens. Pure."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.sequences import edges
from megatron_rl.data.batch import ROUTES, TOKENS, PackedBatch, cu_seqlens_of
from megatron_rl.data.rows import Rows
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.data.vision import ImageProcessor

_SHORT_STRETCH = 32
"""Mean tokens per span below which one copy by token index is faster than one copy per span."""


def pack(
    trajectories: Sequence[Trajectory],
    fields: dict[str, Tensor],
    vision: ImageProcessor | None = None,
    spans: Sequence[tuple[int, int]] | None = None,
) -> PackedBatch:
    """Pack prompts and responses so far with per-token ``fields`` [T]; ``vision`` finds the prompts' images.

    Tokens are not copied (``PackedBatch.parts``), and images are files (``Images.sources``). ``spans``: the token range of each
    trajectory that the fields cover; None means its response.
    """
    if spans is None:
        spans = [(len(t.prompt.token_ids), t.num_tokens) for t in trajectories]
    lengths = torch.tensor([t.num_tokens for t in trajectories], dtype=torch.int64)
    images = None if vision is None else vision.batch([t.prompt.images for t in trajectories])
    parts = {TOKENS: Rows.of([t.token_parts() for t in trajectories])} if trajectories else {}
    tokens = torch.empty(int(lengths.sum()), dtype=torch.int64, device="meta" if trajectories else "cpu")
    ids, of_fields = tuple(t.id for t in trajectories), torch.tensor(spans, dtype=torch.int64).reshape(-1, 2)
    return PackedBatch(tokens, cu_seqlens_of(lengths), fields, images, ids, parts, of_fields)


def window_batch(trajectories: Sequence[Trajectory], step: int, vision: ImageProcessor | None = None) -> PackedBatch:
    """Pack prompts and responses so far. Fields: ``mask``, on for the tokens that train in ``step``, and ``rollout_logprobs``.

    Every window of a response needs the prompt's images again.
    """
    num_tokens = sum(t.num_tokens for t in trajectories)
    mask, logprobs = np.zeros(num_tokens, bool), np.zeros(num_tokens, np.float32)
    end, spans = 0, []
    for trajectory in trajectories:
        origin, first, last = end, 0, 0
        end += len(trajectory.prompt.token_ids)
        first_step = trajectory.first_training_step(step)
        for segment in trajectory.segments:
            start, end = end, end + len(segment.token_ids)
            if segment.generated and first_step <= segment.step <= step:
                mask[start:end], logprobs[start:end] = True, segment.rollout_logprobs
                # Never 0 for a first segment, because every prompt has tokens.
                first, last = first or start - origin, end - origin
        spans.append((first, last))
    fields = {"mask": torch.from_numpy(mask), "rollout_logprobs": torch.from_numpy(logprobs)}
    return pack(trajectories, fields, vision, spans)


def window_routes(trajectories: Sequence[Trajectory], step: int) -> Rows | None:
    """Return [layers, k] per token: the experts that the server chose in ``step`` (``data.batch.ROUTES``), 0 where unknown.

    Returns None if no trajectory has routes of this step.
    """
    records = [t.routes[1] if t.routes is not None and t.routes[0] == step else None for t in trajectories]
    if not any(record is not None for record in records):
        return None
    return Rows.of([[] if record is None else [record] for record in records])


def with_routes(batch: PackedBatch, routes: Rows | None) -> PackedBatch:
    """Return the batch with the experts that the policy's passes must replay; ``routes`` None: the policy chooses."""
    return batch if routes is None else replace(batch, parts={**batch.parts, ROUTES: routes})


def response_field(parts: Sequence[np.ndarray], trajectories: Sequence[Trajectory], dtype: type = np.float32) -> Tensor:
    """Concatenate the responses' arrays to a field [T], with zeros on the prompts."""
    rows: list[np.ndarray] = [np.zeros(0, dtype)]  # so that a batch without trajectories gives an empty field
    for part, trajectory in zip(parts, trajectories, strict=True):
        rows += [np.zeros(len(trajectory.prompt.token_ids), dtype), part.astype(dtype, copy=False)]
    return torch.from_numpy(np.concatenate(rows))


class Stretches:
    """The spans of True in a mask [T] bool, computed once for repeated reads and writes. W tokens are on."""

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask
        borders = edges(mask.numpy())
        self._starts, self._ends = borders[::2], borders[1::2]
        self._offsets = np.concatenate([[0], np.cumsum(self._ends - self._starts)])
        # Many short spans are faster to copy by one index of their tokens than span by span.
        self._is_short = len(borders) * _SHORT_STRETCH > len(mask)

    def on_mask(self, values: Tensor) -> Tensor:
        """Return [T]: ``values`` [W] where the mask is on, 0 elsewhere."""
        found = torch.from_numpy(np.zeros(len(self._mask), values.numpy().dtype))
        if self._is_short:
            # masked_scatter_ is one pass, while indexing by a mask first lists its indices.
            return found.masked_scatter_(self._mask, values)
        to, of = found.numpy(), values.numpy()
        for first, end, start in zip(self._starts.tolist(), self._ends.tolist(), self._offsets.tolist(), strict=False):
            to[first:end] = of[start : start + end - first]
        return found

    def within(self, values: Tensor) -> Tensor:
        """Return [W]: the entries of ``values`` [T] at the mask's W True tokens, the inverse of ``on_mask``."""
        if self._is_short:
            return values[self._mask]
        of = values.numpy()
        parts = (of[first:end] for first, end in zip(self._starts.tolist(), self._ends.tolist(), strict=True))
        return torch.from_numpy(np.concatenate([of[:0], *parts]))

    def borders(self, cu_seqlens: Tensor) -> Tensor:
        """Return [N+1] int64: the start of each sequence in the result of ``within``."""
        ends, place = self._offsets[1:], cu_seqlens.numpy()
        stretch = np.searchsorted(self._ends, place)  # the first that does not end before the place
        before = np.append(self._offsets[:-1], self._offsets[-1])[stretch]
        inside = place - np.append(self._starts, place[-1:])[stretch]
        return torch.from_numpy(before + np.maximum(inside, 0) * (stretch < len(ends)))


def on_mask(values: Tensor, mask: Tensor) -> Tensor:
    """Return [T]: ``values`` [number of True in mask] where ``mask`` [T] is on, 0 elsewhere."""
    return Stretches(mask).on_mask(values)


def within(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``values`` [T] where ``mask`` [T] is on: the inverse of ``on_mask``."""
    return Stretches(mask).within(values)
