"""Trajectories as packed batches: prompts and responses back to back, and arrays over their tokens. Pure."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_rl.data.batch import ROUTES, PackedBatch, cu_seqlens_of
from megatron_rl.data.trajectory import Trajectory, joined
from megatron_rl.data.vision import Vision


def pack(trajectories: Sequence[Trajectory], fields: dict[str, Tensor], vision: Vision | None = None) -> PackedBatch:
    """Prompts and responses so far with per-token ``fields`` [T]; ``vision`` cuts the images of the prompts."""
    lengths = torch.tensor([t.num_tokens for t in trajectories], dtype=torch.int64)
    images = None if vision is None else vision.batch([t.prompt.images for t in trajectories])
    tokens = torch.from_numpy(joined((part for t in trajectories for part in t.token_parts()), np.int32).astype(np.int64))
    return PackedBatch(tokens, cu_seqlens_of(lengths), fields, images, tuple(t.id for t in trajectories))


def window_batch(
    trajectories: Sequence[Trajectory], step: int | None, vision: Vision | None = None
) -> PackedBatch:
    """Prompt and response so far; ``mask`` is on the tokens that ``step`` generated, rollout_logprobs next to it.

    ``step`` None: on all that the model generated.

    Every window of a response needs the prompt's images again, so ``vision`` cuts them in every step.
    """
    mask = response_field([t.window_mask(step) for t in trajectories], trajectories, bool)
    logprobs = response_field([t.rollout_logprobs() for t in trajectories], trajectories, np.float32)
    return pack(trajectories, {"mask": mask, "rollout_logprobs": torch.where(mask, logprobs, 0.0)}, vision)


def window_routes(trajectories: Sequence[Trajectory], step: int) -> Tensor | None:
    """[T, layers, k] int16: the experts that the engine chose in ``step`` (``data.batch.ROUTES``), 0 where it said nothing.

    None when no trajectory has a record of this step.
    """
    records = [t.routes.routes if t.routes is not None and t.routes.step == step else None for t in trajectories]
    shapes = {record.shape[1:] for record in records if record is not None}
    if not shapes:
        return None
    (shape,) = shapes
    rows = []
    for trajectory, record in zip(trajectories, records, strict=True):
        num_missing = trajectory.num_tokens
        if record is not None:
            rows.append(record)
            num_missing -= len(record)
        rows.append(np.zeros((num_missing, *shape), dtype=np.int16))
    return torch.from_numpy(np.concatenate(rows))


def with_routes(batch: PackedBatch, routes: Tensor | None) -> PackedBatch:
    """The batch with the experts that the policy's passes over it are to follow; None: it chooses by itself."""
    return batch if routes is None else batch.with_fields(**{ROUTES: routes})


def response_field(parts: Sequence[np.ndarray], trajectories: Sequence[Trajectory], dtype: type = np.float32) -> Tensor:
    """[T]: one array over each response's tokens, zeros on the prompts."""
    rows: list[np.ndarray] = [np.zeros(0, dtype)]  # so that no trajectory at all is an empty field
    for part, trajectory in zip(parts, trajectories, strict=True):
        rows += [np.zeros(len(trajectory.prompt.token_ids), dtype), part.astype(dtype, copy=False)]
    return torch.from_numpy(np.concatenate(rows))


def on_mask(values: Tensor, mask: Tensor) -> Tensor:
    """[T]: ``values`` [number of True in mask] where ``mask`` [T] is on, 0 elsewhere."""
    # One pass; putting at the places of a mask first makes a list of them.
    return torch.zeros(len(mask), dtype=values.dtype).masked_scatter_(mask, values)
