"""Images of a step's sequences: files on the way to the ranks, patches on the ranks. No collectives.

A replica gets the file of an image once, for any number of its sequences, and cuts it into patches once: each rank
with the encoder cuts its share, and the ranks exchange patches when they distribute the encoding
(``models/image_encoding.py``). Threads cut while the rank computes, in the order of the sequences, which is that of
the micro-batches: a micro-batch waits only for its own images.
"""

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.data.batch import Images
from megatron_rl.data.images import ImageFile
from megatron_rl.data.rows import Rows
from megatron_rl.data.vision import ImageProcessor
from megatron_rl.families.family import ModelConfig
from megatron_rl.families.model_facts import takes_images
from megatron_rl.parallel.topology import Topology
from megatron_rl.system.files.shared_file import SharedArrays

_MOST_THREADS = 4

Cut = Callable[[int, ImageFile], Future[Tensor] | None]
"""Function that starts to cut the image of a number; returns None if another rank cuts it."""


class ImageDirectory:
    """The driver's directory of the images on the ranks of one layout, for one step."""

    def __init__(self, num_replicas: int, shared: SharedArrays | None) -> None:
        """``shared``: where to put files that other ranks of this machine are to map; None: there are no other ranks."""
        self._shared = shared
        self._files: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """Python id of a file's bytes -> the bytes, and their copy that others can map."""
        self._numbers: dict[tuple[str, int], int] = {}
        """(digest, size) of an image -> its number."""
        self._held: list[set[int]] = [set() for _ in range(num_replicas)]

    def payload(self, images: Images, sequences: Sequence[int], replica: int) -> dict[str, Tensor | Rows]:
        """The images of those ``sequences`` of the batch that are new to the replica, for ``ImageCache.take``."""
        shown: list[list[int]] = []
        new: dict[int, ImageFile] = {}
        for sequence in sequences:
            files = [_file(images.sources[image]) for image in images.of(sequence)]
            shown.append([self._number(file) for file in files])
            new |= {number: file for number, file in zip(shown[-1], files, strict=True) if number not in self._held[replica]}
        self._held[replica].update(new)
        about = [(number, file.ref, len(file.data)) for number, file in new.items()]
        return {
            "images": torch.frombuffer(bytearray(pickle.dumps((shown, about))), dtype=torch.uint8),
            "image_files": Rows.of([[self._mappable(file.data)] for file in new.values()], np.zeros(0, np.uint8)),
        }

    def _mappable(self, data: np.ndarray) -> np.ndarray:
        """Put a file where others can map it, once for all replicas."""
        if self._shared is None:
            return data
        if id(data) not in self._files:
            self._files[id(data)] = data, self._shared.put(data)
        return self._files[id(data)][1]

    def _number(self, file: ImageFile) -> int:
        return self._numbers.setdefault((file.ref.digest, file.ref.max_tokens), len(self._numbers))


def _file(source: object) -> ImageFile:
    assert isinstance(source, ImageFile)  # as the driver's batches have them
    return source


class ImageCache:
    """The images of the sequences on this rank."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._patches: dict[int, Future[Tensor] | None] = {}
        self._grids: dict[int, tuple[int, int, int]] = {}
        self._shown: dict[int, list[int]] = {}
        """Sequence -> the numbers of its images."""

    def take(self, payload: Mapping[str, Any], new: Sequence[int]) -> None:
        """Add the images that ``ImageDirectory`` has sent for the sequences ``new``."""
        shown, about = pickle.loads(payload["images"].numpy().tobytes())
        for index, (number, ref, _) in enumerate(about):
            self._grids[number] = ref.grid
            # Packed into separate memory: threads may read the file after the driver has dropped it.
            self._patches[number] = self._cut(number, ImageFile(ref, payload["image_files"].select([index]).packed()))
        self._shown |= dict(zip(new, shown, strict=True))

    def of(self, sequences: Sequence[int]) -> Images:
        found = [self._shown[sequence] for sequence in sequences]
        numbers = [number for shown in found for number in shown]
        return Images(
            sources=[self._patches[number] for number in numbers],
            grids=torch.tensor([self._grids[number] for number in numbers], dtype=torch.int64).view(-1, 3),
            sequences=torch.repeat_interleave(torch.tensor([len(shown) for shown in found], dtype=torch.int64)),
        )

    def drop(self) -> None:
        """Cancel the images that are not cut yet."""
        for patches in self._patches.values():
            if patches is not None:
                patches.cancel()


class ImagePatcher:
    """Threads of this rank that cut images into patches for the model in the folder ``path``."""

    def __init__(self, path: str | Path, models: Sequence[ModelConfig] = ()) -> None:
        """Raises DataError if one of the rank's ``models`` takes images, but the folder has no image processor."""
        self._path = path
        if any(map(takes_images, models)):
            _ = self._vision

    @cached_property
    def _vision(self) -> ImageProcessor:
        return ImageProcessor(self._path)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return ThreadPoolExecutor(max(1, min(cores, _MOST_THREADS)), "images")

    def share_of(self, place: Topology, parallel: ParallelConfig) -> Cut:
        """Function that cuts this rank's share: the ranks with the same batch that share the encoding cut equal numbers of images."""
        # Without sequence parallelism every tensor-parallel peer encodes all of them (models/image_encoding.py).
        num_tensor_ranks, tensor_rank = (place.tp_size, place.tp_rank) if parallel.sequence_parallel else (1, 0)
        num_peers, own = num_tensor_ranks * place.cp_size, num_tensor_ranks * place.cp_rank + tensor_rank

        def cut(number: int, file: ImageFile) -> Future[Tensor] | None:
            if place.pp_rank > 0 or number % num_peers != own:
                return None
            return self._threads.submit(self._vision.patchify, file)

        return cut
