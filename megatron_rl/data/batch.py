"""Packed batches: sequences back to back in 1-D tensors.

Alignment, everywhere outside the models: entry t of a per-token tensor speaks of *token t*. ``logprobs[t]`` is the
log-probability of token t given the tokens before it; ``values[t]`` is V(s_t), read before token t is emitted. The
first token of a sequence has no such number: its entry is 0 and its mask is 0.
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
ALSO_WANTED = ("lm_mask", "window")
"""Fields [T] bool: tokens outside ``mask`` whose log-probs a pass of a policy gives too."""


@dataclass(frozen=True, eq=False)
class Images:
    """The images of a batch, in the order of their tokens."""

    sources: "Sequence[ImageFile | Tensor | Future[Tensor] | None]"
    """On the driver the file of each image. On a rank its patches as the model's image processor cuts them, [t*h*w, values of
    a patch] float32, perhaps not cut yet; None where another rank that has the batch cuts them."""
    grids: Tensor
    """[I, 3] int64, patches of each image in time, height and width."""
    sequences: Tensor
    """[I] int64, ascending: the sequence of the batch that each image belongs to."""

    @classmethod
    def of_patches(cls, patches: Tensor, grids: Tensor, sequences: Tensor) -> "Images":
        """``patches`` [P, values of a patch] of all images, back to back."""
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
    """[T] int64, the sequences back to back (prompt, then response); without data (``meta``) where ``parts`` have them."""
    cu_seqlens: Tensor
    """[N+1] int64, where each sequence starts; the last entry is T."""
    fields: dict[str, Tensor] = field(default_factory=dict)
    """Per-token tensors [T] by name: mask, advantages, old_logprobs, ...; ``ROUTES`` has more dimensions."""
    images: Images | None = None
    """The images of a vision-language model's batch; each stands for a span of image tokens."""
    ids: tuple[int, ...] = ()
    """The ids of a step's sequences; an id and a length name a sequence while the ranks cache it. Empty: the ranks cache nothing."""
    parts: Mapping[str, Rows] = field(default_factory=dict)
    """``TOKENS`` and ``ROUTES`` that are not packed yet: the ranks that work on them will pack them."""
    spans: Tensor | None = None
    """[N, 2] int64: first and end of a stretch of each sequence's tokens, counted from its start. What a field says outside of
    it nobody reads: the ranks get 0 there. None: fields speak of all tokens."""

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
        """This batch with the fields ``names`` alone, those of them that it has."""
        parts = {name: parts for name, parts in self.parts.items() if name in (TOKENS, *names)}
        return replace(self, fields={name: self.fields[name] for name in names if name in self.fields}, parts=parts)

    def columns(self) -> dict[str, Tensor | Rows]:
        """The numbers of its tokens by name: fields and parts."""
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
        return PackedBatch(
            tokens=self.taken(self.tokens, indices),
            cu_seqlens=cu_seqlens_of(self.lengths[torch.tensor(indices, dtype=torch.int64)]),
            fields={name: self.taken(values, indices) for name, values in self.fields.items()},
            images=self.images.select(indices) if self.images is not None else None,
            ids=tuple(self.ids[index] for index in indices) if self.ids else (),
            parts={name: parts.select(indices) for name, parts in self.parts.items()},
            spans=None if self.spans is None else self.spans[torch.tensor(indices, dtype=torch.int64)],
        )

    def taken(self, values: Tensor, indices: Sequence[int]) -> Tensor:
        """The ``values`` [T, ...] of the sequences ``indices`` in that order."""
        borders = self.cu_seqlens.tolist()
        if values.is_meta:
            return values.new_empty(sum(borders[index + 1] - borders[index] for index in indices))
        # Whole stretches: a list of all their rows takes more memory and time than they do.
        return torch.cat([values[:0], *(values[borders[index] : borders[index + 1]] for index in indices)])

    def rows(self, indices: Sequence[int]) -> Tensor:
        """[tokens of the sequences ``indices``] int64: where they stand in per-token tensors, in that order."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        lengths = self.lengths[chosen]
        borders = cu_seqlens_of(lengths)
        return torch.arange(int(borders[-1])) + (self.cu_seqlens[chosen] - borders[:-1]).repeat_interleave(lengths)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; the host goes on at once where that is a GPU, whose work waits for the copy by itself."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def cu_seqlens_of(lengths: Tensor) -> Tensor:
    """[N] lengths -> [N+1] int64 starts, the last entry is the total."""
    return torch.nn.functional.pad(lengths.to(torch.int64).cumsum(0), (1, 0))
