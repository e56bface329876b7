"""Each image is cut by one rank, and images of a released step are cancelled."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.config.schema import Config, ParallelConfig
from megatron_rl.data.batch import Images, PackedBatch
from megatron_rl.data.images import ImageFile, ImageRef
from megatron_rl.parallel import collectives
from megatron_rl.parallel.topology import Topology
from megatron_rl.training import trainer_rank
from megatron_rl.training.sequence_cache import CacheDirectory, ImagePatcher
from megatron_rl.training.trainer_rank import TrainerRank

NUM_IMAGES = 24


def place(sizes: tuple[int, int, int], tp: int, cp: int, pp: int) -> Topology:
    return Topology(0, 1, tp, sizes[0], pp, sizes[2], 0, 1, torch.device("cpu"), cp, sizes[1])


def cutting(cut: Any) -> ImagePatcher:
    found = ImagePatcher("")
    vars(found)["_vision"] = SimpleNamespace(patchify=cut)
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("sizes", itertools.product((1, 2, 3), (1, 2), (1, 2)))
def test_one_of_the_ranks_that_share_an_encoding_cuts_each_image(sizes: tuple[int, int, int], sequence_parallel: bool) -> None:
    parallel = ParallelConfig(tensor_parallel_size=sizes[0], sequence_parallel=sequence_parallel)
    cutters: dict[int, list[tuple[int, int, int]]] = {number: [] for number in range(NUM_IMAGES)}
    file = ImageFile(ImageRef("a.png", "", (1, 2, 2)), np.zeros(1, np.uint8))
    loads = []
    for tp, cp, pp in itertools.product(*map(range, sizes)):
        cut = cutting(lambda file: torch.zeros(4, 5)).share_of(place(sizes, tp, cp, pp), parallel)
        own = [number for number in cutters if cut(number, file) is not None]
        loads += [len(own)] if pp == 0 else []
        for number in own:
            cutters[number].append((tp, cp, pp))
    for found in cutters.values():
        assert all(pp == 0 for *_, pp in found), "later stages have no encoder"
        # Tensor ranks that do not share the encoding each need all patches.
        assert len(found) == (1 if sequence_parallel else sizes[0]) and len({cp for _, cp, _ in found}) == 1
    assert len(set(loads)) == 1, "all cut as many"


def test_releasing_a_step_cancels_only_the_images_of_that_step(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def slowly(file: ImageFile) -> torch.Tensor:
        begun.set()
        may_go_on.wait(10)
        return torch.full((file.ref.num_patches, 5), 7.0)

    threads = cutting(slowly)
    vars(threads)["_threads"] = ThreadPoolExecutor(1)
    files = [ImageFile(ImageRef("a.png", str(i), (1, 2, 2)), np.zeros(8, np.uint8)) for i in range(3)]
    images = Images(files, torch.tensor([[1, 2, 2]] * 3), torch.arange(3))
    batch = PackedBatch(torch.arange(6), torch.tensor([0, 2, 4, 6]), images=images)
    monkeypatch.setattr(trainer_rank, "ImagePatcher", lambda *_: threads)
    alone: Any = SimpleNamespace(topology=place((1, 1, 1), 0, 0, 0), parallel=ParallelConfig())
    rank = TrainerRank(Config(), alone.topology, {})
    (payload,) = CacheDirectory(1).payloads(batch, [[[0, 1, 2]]], [])
    tensors = collectives.unflatten(collectives.flatten(payload))
    caches = [rank.cache_of(alone, step) for step in (1, 2)]
    found: list[Any] = [cache.take(tensors, {})[0].images for cache in caches]
    begun.wait(10)
    rank.release(1)
    may_go_on.set()
    running, *waiting = found[0].sources
    assert running.result(10)[0, 0] == 7 and all(future.cancelled() for future in waiting)
    assert [found[1].patches(image)[0, 0].item() for image in range(3)] == [7, 7, 7]
    rank.release(None)
    assert all(rank.cache_of(alone, step) is not cache for step, cache in zip((1, 2), caches, strict=True))
