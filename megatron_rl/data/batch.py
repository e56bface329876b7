"""Packed batches: sequences concatenated in 1-D tensors.

Alignment, everywhere outside the models: entry t of a per-token tensor belongs to *token t*. ``logprobs[t]`` is the
log-probability of token t given the tokens before it; ``values[t]`` is V(s_t), before token t is emitted. The first
token of a sequence has no such value: its entry is 0 and its mask is 0.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from megatron_rl.data.images import ImageFile
from megatron_rl.data.rows import Rows

TOKENS = "tokens"
ROUTES = "routes"
"""Field [T, layers, k] of a mixture-of-experts policy's batch, uint8 or int16: expert id + 1 of each token, 0 without a record."""
TEACHER_IDS, TEACHER_LOGPROBS = "teacher_ids", "teacher_logprobs"
"""Fields [T, k]: the reference's k most likely tokens at the position of each token, int32, and their log-probs, float32."""
ALSO_WANTED = ("lm_mask", "window")
"""Fields [T] bool: further tokens, outside ``mask``, whose log-probs a policy's pass computes."""
DUMMY_TOKENS = 2
"""Number of tokens of a dummy micro-batch, which has no sequences."""


@dataclass(frozen=True, eq=False)
class Images:
    """The images of a batch, in the order of their tokens."""

    sources: "Sequence[ImageFile | Tensor | Future[Tensor] | None]"
    """On the driver the file of each image. On a rank its patches, [t*h*w, values of a patch] float32, perhaps not
    cut yet; None if another rank with the same batch cuts them."""
    grids: Tensor
    """[I, 3] int64, patches of each image in time, height and width."""
    sequences: Tensor
    """[I] int64, ascending: the sequence of the batch that each image belongs to."""

    @classmethod
    def of_patches(cls, patches: Tensor, grids: Tensor, sequences: Tensor) -> "Images":
        """``patches`` [P, values of a patch] of all images, concatenated."""
        return cls(patches.split(grids.prod(-1).tolist()), grids, sequences)

    def patches(self, image: int) -> Tensor:
        """The patches of an image that this rank cuts; waits for them."""
        found = self.sources[image]
        found = found.result() if isinstance(found, Future) else found
        assert isinstance(found, Tensor)
        return found

    def of(self, sequence: int) -> range:
        """The images of a sequence."""
        first, end = np.searchsorted(self.sequences.numpy(), [sequence, sequence + 1]).tolist()
        return range(first, end)

    def select(self, indices: Sequence[int]) -> "Images":
        """The images of the sequences ``indices``, renumbered in that order."""
        found = [self.of(index) for index in indices]
        chosen = [image for images in found for image in images]
        return Images(
            sources=[self.sources[image] for image in chosen],
            grids=self.grids[chosen],
            sequences=torch.repeat_interleave(torch.tensor([len(images) for images in found], dtype=torch.int64)),
        )


@dataclass(frozen=True)
class PackedBatch:
    tokens: Tensor
    """[T] int64, the concatenated sequences (prompt, then response); without data (``meta``) if ``parts`` has the tokens."""
    cu_seqlens: Tensor
    """[N+1] int64, start of each sequence, always in host memory; the last entry is T."""
    fields: dict[str, Tensor] = field(default_factory=dict)
    """Per-token tensors [T] by name: mask, advantages, old_logprobs, ...; ``ROUTES`` and the teacher's have more dimensions."""
    images: Images | None = None
    """The images of a vision-language model's batch; each stands for a span of image tokens."""
    ids: tuple[int, ...] = ()
    """Ids of a step's sequences; an id and a length name a sequence in the ranks' caches. Empty: the ranks cache nothing."""
    parts: Mapping[str, Rows] = field(default_factory=dict)
    """``TOKENS`` and ``ROUTES`` that are not packed yet; ranks pack them when they need them."""
    spans: Tensor | None = None
    """[N, 2] int64: first and end of the tokens of each sequence that fields cover, counted from the sequence's
    start; the ranks get 0 elsewhere. None: fields cover all tokens."""

    @property
    def lengths(self) -> Tensor:
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    def with_fields(self, **new_fields: Tensor) -> "PackedBatch":
        """This batch with fields added or replaced."""
        return replace(self, fields={**self.fields, **new_fields})

    def only(self, *names: str) -> "PackedBatch":
        """This batch with only those fields that are in ``names``."""
        parts = {name: parts for name, parts in self.parts.items() if name in (TOKENS, *names)}
        return replace(self, fields={name: self.fields[name] for name in names if name in self.fields}, parts=parts)

    def columns(self) -> dict[str, Tensor | Rows]:
        """Per-token values by name: fields, and parts other than the tokens."""
        return {**self.fields, **{name: parts for name, parts in self.parts.items() if name != TOKENS}}

    def joined(self) -> "PackedBatch":
        """This batch with its parts packed."""
        if not self.parts:
            return self
        lengths, fields, tokens = self.lengths.numpy(), dict(self.fields), self.tokens
        for name, rows in self.parts.items():
            if name == TOKENS:
                tokens = torch.from_numpy(rows.packed(lengths, np.int64))
            else:
                fields[name] = torch.from_numpy(rows.packed(lengths))
        return replace(self, tokens=tokens, fields=fields, parts={})

    def select(self, indices: Sequence[int]) -> "PackedBatch":
        """The sequences ``indices`` in that order."""
        borders, chosen = self.cu_seqlens.tolist(), torch.tensor(indices, dtype=torch.int64)
        return PackedBatch(
            tokens=_selected(self.tokens, borders, indices),
            cu_seqlens=cu_seqlens_of(self.lengths[chosen]),
            fields={name: _selected(values, borders, indices) for name, values in self.fields.items()},
            images=self.images.select(indices) if self.images is not None else None,
            ids=tuple(self.ids[index] for index in indices) if self.ids else (),
            parts={name: parts.select(indices) for name, parts in self.parts.items()},
            spans=None if self.spans is None else self.spans[chosen],
        )


def _selected(values: Tensor, borders: Sequence[int], indices: Sequence[int]) -> Tensor:
    """The ``values`` [T, ...] of the sequences ``indices``; ``borders``: where each sequence starts, and T."""
    if values.is_meta:
        return values.new_empty(sum(borders[index + 1] - borders[index] for index in indices))
    # Slices instead of an index of all their tokens, which takes more memory and time than the copy.
    return torch.cat([values[:0], *(values[borders[index] : borders[index + 1]] for index in indices)])


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``. The copy to a GPU is asynchronous: later work of its stream waits for it."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def cu_seqlens_of(lengths: Tensor) -> Tensor:
    """[N] lengths -> [N+1] int64 starts, the last entry is the total."""
    return torch.nn.functional.pad(lengths.to(torch.int64).cumsum(0), (1, 0))


# ---------------------------------------------------------------------------------------- micro-batches on the ranks, and their results


def reply_spans(batch: PackedBatch) -> tuple[np.ndarray, np.ndarray]:
    """(first, end) [N]: the range of each sequence's tokens, in the batch, for which ranks return values."""
    starts, ends = batch.cu_seqlens[:-1].numpy(), batch.cu_seqlens[1:].numpy()
    if batch.spans is None:
        return starts, ends
    return starts + batch.spans[:, 0].numpy(), starts + batch.spans[:, 1].numpy()


def select_spans(batch: PackedBatch, values: Tensor) -> Tensor:
    """Select the values of a micro-batch's ``values`` [T] that are sent to the driver."""
    if batch.spans is None:
        return values
    firsts, ends = reply_spans(batch)
    return torch.cat([values[:0], *(values[first:end] for first, end in zip(firsts.tolist(), ends.tolist(), strict=True))])


def restore(
    batch: PackedBatch, plan: Sequence[Sequence[Sequence[int]]], results: Sequence[Tensor], *, per_sequence: bool
) -> list[Tensor]:
    """Restore the batch's order in the ranks' ``results``: values per token [T] and, if the results have them, per sequence [N].

    ``plan``: for each result, the sequences of each micro-batch. Tokens outside ``reply_spans`` get 0.
    """
    firsts, ends = (border.tolist() for border in reply_spans(batch))
    # np.zeros, because pages that are never written cost neither time nor memory.
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
    """Replace a batch without sequences by two tokens with every field 0, so that this rank takes part in every collective."""
    if batch.num_sequences:
        return batch
    shapes = {name: values[:0] for name, values in batch.fields.items()}
    shapes |= {name: torch.from_numpy(rows.like.copy()) for name, rows in batch.parts.items()}
    return PackedBatch(
        tokens=batch.tokens.new_zeros(DUMMY_TOKENS),
        cu_seqlens=batch.cu_seqlens.new_tensor([0, DUMMY_TOKENS]),
        fields={name: values.new_zeros((DUMMY_TOKENS, *values.shape[1:])) for name, values in shapes.items()},
        images=batch.images,
    )


def on_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch's tokens and fields on ``device``; copies to a GPU are asynchronous."""
    if batch.tokens.device == device:
        return batch
    return PackedBatch(
        tokens=moved(batch.tokens, device),
        cu_seqlens=batch.cu_seqlens,
        fields={name: moved(values, device) for name, values in batch.fields.items()},
        # Each rank moves the patches of the images that it cuts.
        images=batch.images,
    )
