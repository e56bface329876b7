"""A micro-batch on its way to the model, and the ranks' answers on their way back. Pure."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_rl.data.batch import PackedBatch, moved
from megatron_rl.training.batching import STAND_IN_TOKENS, Plan


def reply_spans(batch: PackedBatch) -> tuple[np.ndarray, np.ndarray]:
    """(first, end) [N] in the batch's tokens: those of each sequence that ranks give numbers of."""
    starts, ends = batch.cu_seqlens[:-1].numpy(), batch.cu_seqlens[1:].numpy()
    if batch.spans is None:
        return starts, ends
    return starts + batch.spans[:, 0].numpy(), starts + batch.spans[:, 1].numpy()


def select_spans(batch: PackedBatch, values: Tensor) -> Tensor:
    """Select the part of a micro-batch's ``values`` [T] that is sent to the driver."""
    if batch.spans is None:
        return values
    firsts, ends = reply_spans(batch)
    return torch.cat([values[:0], *(values[first:end] for first, end in zip(firsts.tolist(), ends.tolist(), strict=True))])


def restore(batch: PackedBatch, plan: Plan, results: Sequence[Tensor], *, per_sequence: bool) -> list[Tensor]:
    """Undo the plan: per-token [T] and, if the results carry them, per-sequence [N] numbers in the batch's order.

    Per token they are of ``reply_spans``; the others are 0.
    """
    firsts, ends = (border.tolist() for border in reply_spans(batch))
    # Pages that nothing is written to take neither time nor memory.
    tokens, sequences = np.zeros(int(batch.cu_seqlens[-1]), np.float32), np.zeros(batch.num_sequences, np.float32)
    for microbatches, result in zip(plan, results, strict=True):
        numbers, position = result.numpy(), 0
        for indices in microbatches:
            for index in indices:
                first, end = firsts[index], ends[index]
                tokens[first:end] = numbers[position : position + end - first]
                position += end - first
            if per_sequence:
                sequences[list(indices)] = numbers[position : position + len(indices)]
                position += len(indices)
    found = [tokens, sequences] if per_sequence else [tokens]
    return [torch.from_numpy(values) for values in found]


def dummy_batch(batch: PackedBatch) -> PackedBatch:
    """A batch without sequences becomes two tokens with every field 0, so that this rank joins every collective."""
    if batch.num_sequences:
        return batch
    shapes = {name: values[:0] for name, values in batch.fields.items()}
    shapes |= {name: torch.from_numpy(rows.like.copy()) for name, rows in batch.parts.items()}
    return PackedBatch(
        tokens=batch.tokens.new_zeros(STAND_IN_TOKENS),
        cu_seqlens=batch.cu_seqlens.new_tensor([0, STAND_IN_TOKENS]),
        fields={name: values.new_zeros((STAND_IN_TOKENS, *values.shape[1:])) for name, values in shapes.items()},
        images=batch.images,
    )


def on_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch where its model is, but for the images; nobody waits for the copies to a GPU."""
    if batch.tokens.device == device:
        return batch
    return PackedBatch(
        tokens=moved(batch.tokens, device),
        cu_seqlens=moved(batch.cu_seqlens, device),
        fields={name: moved(values, device) for name, values in batch.fields.items()},
        # Each rank moves the patches of the images that it cuts.
        images=batch.images,
    )
