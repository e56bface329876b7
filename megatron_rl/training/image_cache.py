"""Images of a step's sequences: their files on the way to the ranks, their patches there. No collectives.

An image's file is sent once to a replica that works on a sequence with it, however many of its sequences that are, and cut
there once: each rank that holds the encoder cuts its share, and the ranks hand each other patches as they share out the
encoding (``models/vision/balance.py``). Threads cut while the rank computes, in the order in which sequences come, which is
that of the micro-batches: a micro-batch waits for its own images alone.
"""

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.data.batch import Images
from megatron_rl.data.images import ImageFile
from megatron_rl.data.vision import ImageProcessor
from megatron_rl.families.family import ModelConfig
from megatron_rl.families.model_facts import takes_images
from megatron_rl.parallel.collectives import Pieces
from megatron_rl.parallel.topology import Topology

_MOST_THREADS = 4

Cut = Callable[[int, ImageFile], Future[Tensor] | None]
"""Begins to cut the image of a number; None where another rank does."""


class ImageDirectory:
    """The driver's account of one layout, for one step."""

    def __init__(self, num_replicas: int) -> None:
        self._numbers: dict[tuple[str, int], int] = {}
        """By digest and size."""
        self._held: list[set[int]] = [set() for _ in range(num_replicas)]

    def payload(
        self, images: Images, sequences: Sequence[int], replica: int, pieces: Callable[[Sequence[np.ndarray]], Pieces]
    ) -> dict[str, Tensor | Pieces]:
        """For ``ImageCache.take``, of ``sequences`` of the batch that the replica has not had. ``pieces``: of these arrays."""
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
            "image_files": pieces([file.data for file in new.values()]),
        }

    def _number(self, file: ImageFile) -> int:
        return self._numbers.setdefault((file.ref.digest, file.ref.max_tokens), len(self._numbers))


def _file(source: object) -> ImageFile:
    assert isinstance(source, ImageFile)  # as the driver's batches have them
    return source


class ImageCache:
    """Of the sequences on this rank."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._patches: dict[int, Future[Tensor] | None] = {}
        self._grids: dict[int, tuple[int, int, int]] = {}
        self._shown: dict[int, list[int]] = {}
        """By sequence, the numbers of its images."""

    def take(self, payload: Mapping[str, Tensor], new: Sequence[int]) -> None:
        """What ``ImageDirectory`` has for the sequences ``new``."""
        shown, about = pickle.loads(payload["images"].numpy().tobytes())
        for (number, ref, _), data in zip(about, payload["image_files"], strict=True):
            self._grids[number] = ref.grid
            # A copy: threads may read it when the driver has forgotten it.
            self._patches[number] = self._cut(number, ImageFile(ref, data.copy()))
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
        """Nothing that is not cut yet will be."""
        for patches in self._patches.values():
            if patches is not None:
                patches.cancel()


class ImagePatcher:
    """Threads of this rank that cut images as the model of the folder ``path`` takes them."""

    def __init__(self, path: str | Path, models: Sequence[ModelConfig] = ()) -> None:
        """DataError where one of the rank's ``models`` takes images, and the folder cannot cut any."""
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
        """This rank's: of the ranks with its batch that share out the encoding, each cuts as many."""
        # Without sequence parallelism every tensor-parallel peer encodes all of them (models/vision/balance.py).
        num_tensor_ranks, tensor_rank = (place.tp_size, place.tp_rank) if parallel.sequence_parallel else (1, 0)
        num_peers, own = num_tensor_ranks * place.cp_size, num_tensor_ranks * place.cp_rank + tensor_rank

        def cut(number: int, file: ImageFile) -> Future[Tensor] | None:
            if place.pp_rank > 0 or number % num_peers != own:
                return None
            return self._threads.submit(self._vision.patchify, file)

        return cut
