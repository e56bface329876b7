"""A micro-batch on its way to the model, and the ranks' answers on their way back. Pure."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.data.batch import PackedBatch, moved
from megatron_rl.training.batching import STAND_IN_TOKENS


def restore(
    batch: PackedBatch, plan: Sequence[Sequence[Sequence[int]]], results: Sequence[Tensor], *, per_sequence: bool
) -> list[Tensor]:
    """Undo the plan: per-token [T] and, if the results carry them, per-sequence [N] numbers in the batch's order."""
    starts, lengths = batch.cu_seqlens[:-1].tolist(), batch.lengths.tolist()
    tokens, sequences = torch.zeros(len(batch.tokens)), torch.zeros(batch.num_sequences)
    for microbatches, result in zip(plan, results, strict=True):
        position = 0
        for indices in microbatches:
            for index in indices:
                tokens[starts[index] : starts[index] + lengths[index]] = result[position : position + lengths[index]]
                position += lengths[index]
            if per_sequence:
                sequences[list(indices)] = result[position : position + len(indices)]
                position += len(indices)
    return [tokens, sequences] if per_sequence else [tokens]


def stand_in(batch: PackedBatch) -> PackedBatch:
    """A batch without sequences becomes two tokens with every field 0, so that this rank joins every collective."""
    if batch.num_sequences:
        return batch
    return PackedBatch(
        tokens=batch.tokens.new_zeros(STAND_IN_TOKENS),
        cu_seqlens=batch.cu_seqlens.new_tensor([0, STAND_IN_TOKENS]),
        fields={name: values.new_zeros((STAND_IN_TOKENS, *values.shape[1:])) for name, values in batch.fields.items()},
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
