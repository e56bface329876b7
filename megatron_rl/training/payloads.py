"""A batch on its way to the ranks and the ranks' answers on their way back: pure, and in the order of a plan."""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_rl.data.batch import Images, PackedBatch, cu_seqlens_of, moved
from megatron_rl.training.batching import STAND_IN_TOKENS, Plan


def payloads_of(batch: PackedBatch, plan: Plan) -> list[dict[str, Tensor]]:
    """By data-parallel rank."""
    return [_pack(batch, microbatches) for microbatches in plan]


def _pack(batch: PackedBatch, microbatches: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """One rank's micro-batches as one payload; ``unpack`` is its inverse."""
    chosen = batch.select([index for indices in microbatches for index in indices])
    # Ids of any vocabulary fit half the bytes.
    payload = {"tokens": chosen.tokens.to(torch.int32), "cu_seqlens": chosen.cu_seqlens}
    payload["microbatch_sizes"] = torch.tensor([len(indices) for indices in microbatches], dtype=torch.int64)
    if chosen.images is not None:
        payload |= {f"images/{name}": values for name, values in vars(chosen.images).items()}
    return payload | {f"field/{name}": values for name, values in chosen.fields.items()}


def unpack(payload: Mapping[str, Tensor]) -> list[PackedBatch]:
    if not payload:
        return []
    fields = {name.removeprefix("field/"): t for name, t in payload.items() if name.startswith("field/")}
    images = {name.removeprefix("images/"): t for name, t in payload.items() if name.startswith("images/")}
    all_images = Images(**images) if images else None
    tokens = payload["tokens"].to(torch.int64)
    borders = cu_seqlens_of(payload["microbatch_sizes"]).tolist()
    microbatches = []
    for first, last in itertools.pairwise(borders):
        cu_seqlens = payload["cu_seqlens"][first : last + 1]
        rows = slice(int(cu_seqlens[0]), int(cu_seqlens[-1]))
        microbatches.append(
            PackedBatch(
                tokens[rows],
                cu_seqlens - cu_seqlens[0],
                {name: t[rows] for name, t in fields.items()},
                all_images.select(range(first, last)) if all_images is not None else None,
            )
        )
    return microbatches


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
        # Each rank moves the patches of the images that it encodes.
        images=batch.images,
    )
