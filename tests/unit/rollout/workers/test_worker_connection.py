"""Frames deliver messages unchanged, and the shared file contains exactly the referenced arrays."""

import asyncio
import gc
import os
from typing import Any

import numpy as np
import pytest

from megatron_rl.rollout.workers.worker_connection import frame, read_frame
from megatron_rl.system.files.shared_file import MappedFile, SharedFile, new_file

LARGE_BYTES = 1 << 16


class Pair:
    """Both sides of one shared file, in one process."""

    def __init__(self) -> None:
        self.fd = new_file("test")
        self.worker, self.dropped = SharedFile(self.fd), list[tuple[int, int]]()
        self.owner = MappedFile(self.fd, lambda *dropped: self.dropped.append(dropped))

    def to_owner(self, message: Any) -> tuple[Any, int]:
        """(received message, number of bytes sent)."""
        return transfer(message, self.worker.put, self.owner)

    def to_worker(self, message: Any) -> tuple[Any, int]:
        return transfer(message, self.owner.range_of, self.worker)

    def num_held(self) -> int:
        """Bytes of memory, after the worker has freed all dropped ranges."""
        gc.collect()
        while self.dropped:
            self.worker.free(*self.dropped.pop())
        return os.fstat(self.fd).st_blocks * 512


def transfer(message: Any, range_of: Any, file: Any) -> tuple[Any, int]:
    sent = b"".join(frame(message, range_of))

    async def read() -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(sent)
        reader.feed_eof()
        return await read_frame(reader, file.at)

    return asyncio.run(read()), len(sent)


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_arrays_of_all_sizes_arrive_unchanged(pair: Pair) -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        sizes = rng.integers(0, 9000, size=5)
        sent = {
            "ids": [rng.integers(0, 99, size=n).astype(np.int32) for n in sizes],
            "logprobs": rng.normal(size=sizes[0]).astype(np.float32),
            "routes": rng.integers(0, 9, size=(sizes[1], 3, 2)).astype(np.int16),
            "text": "ä" * 7,
        }
        for direction in (pair.to_owner, pair.to_worker):
            got, _ = direction(sent)
            assert got["text"] == sent["text"]
            np.testing.assert_array_equal(got["routes"], sent["routes"])
            np.testing.assert_array_equal(got["logprobs"], sent["logprobs"])
            for ours, theirs in zip(got["ids"], sent["ids"], strict=True):
                np.testing.assert_array_equal(ours, theirs)
                assert ours.dtype == theirs.dtype and not ours.flags.writeable


def test_arrays_of_the_shared_file_are_never_sent(pair: Pair) -> None:
    array = np.arange(3000, dtype=np.int32)
    got, sent_bytes = pair.to_owner(array)
    assert sent_bytes < 500
    back, sent_bytes = pair.to_worker([got, got[100:2900], array])
    assert array.nbytes < sent_bytes < array.nbytes + 1000, "only the copy outside the file is sent"
    np.testing.assert_array_equal(back[0], array)
    np.testing.assert_array_equal(back[1], array[100:2900])


def test_shared_memory_is_freed_with_the_last_reference(pair: Pair) -> None:
    kept = [pair.to_owner(np.full(1000, i, np.int32))[0] for i in range(100)]
    large = pair.to_owner(np.zeros((100, 10, 20), np.int16))[0]
    assert pair.num_held() >= sum(array.nbytes for array in kept) + large.nbytes
    del large
    survivor = kept[3]
    del kept
    assert pair.num_held() == 4096, "the page of the survivor"
    np.testing.assert_array_equal(survivor, np.full(1000, 3))
    back, _ = pair.to_worker(survivor)
    del survivor
    pair.to_owner(np.zeros(100))
    assert pair.num_held() == 0 and back[0] == 3, "the worker has a copy of what it still reads"


def test_received_arrays_outlive_their_worker(pair: Pair) -> None:
    got = [pair.to_owner(np.arange(number))[0] for number in (10, LARGE_BYTES)]
    del pair.worker
    gc.collect()
    for array in got:
        np.testing.assert_array_equal(array, np.arange(len(array)))


def test_array_at_the_address_of_freed_memory_is_not_confused_with_it(pair: Pair) -> None:
    first = pair.to_owner(np.zeros(LARGE_BYTES, np.uint8))[0]
    range_ = pair.owner.range_of(memoryview(first))
    assert range_ is not None
    del first
    gc.collect()
    assert pair.dropped == [range_]
    # Most likely the kernel gives the same addresses again.
    others = [np.zeros(LARGE_BYTES * 4, np.uint8) for _ in range(20)]
    assert all(pair.owner.range_of(memoryview(other)) is None for other in others)
