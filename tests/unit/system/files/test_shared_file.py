"""An array of a shared file has one address everywhere; its memory goes with the last reference, and descriptors with the file."""

import gc
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from megatron_rl.errors import UserError
from megatron_rl.system.files import shared_file
from megatron_rl.system.files.shared_file import (
    Address,
    MappedFile,
    SharedArrays,
    SharedFile,
    address_of,
    bytes_at,
    files_of,
    new_file,
)

PAGE = 4096
READER = """
import sys
import numpy as np
from megatron_rl.system.files.shared_file import bytes_at
print(sum(int(raw.sum()) for raw in bytes_at(np.array(sys.argv[1:], np.int64).reshape(-1, 4))))
"""


def read_elsewhere(addresses: list[Address]) -> int:
    """Sum of all bytes of the arrays, as read by another process."""
    numbers = [str(number) for address in addresses for number in address]
    return int(subprocess.run([sys.executable, "-c", READER, *numbers], check=True, capture_output=True).stdout)


def num_held(path: str) -> int:
    """Bytes of memory that a file occupies."""
    gc.collect()
    return os.stat(path).st_blocks * 512


class Worker:
    """Both ends of a worker's file: what the owner drops, the worker frees."""

    def __init__(self) -> None:
        self.fd = new_file("worker")
        self.file = SharedFile(self.fd)
        self.mapped = MappedFile(self.fd, self.file.free)

    def write(self, *arrays: np.ndarray) -> np.ndarray:
        return self.mapped.at(self.file.put_together(arrays))

    def held(self) -> int:
        return num_held(f"/proc/self/fd/{self.fd}")


def test_other_processes_read_any_view_at_its_address() -> None:
    arrays, rng = SharedArrays(), np.random.default_rng(1)
    kept, found, expected = [], [], 0
    for shape in ((5,), (3000, 7), (2_000_000,), (40, 3, 2)):
        array = arrays.put(rng.integers(0, 90, shape).astype(np.int16))
        for view in (array, array[1:-1], array[2:3], array.view()):
            address = address_of(view)
            assert address is not None and address.num_bytes == view.nbytes
            kept.append(view)
            found.append(address)
            expected += int(view.view(np.uint8).astype(np.int64).sum())
    assert read_elsewhere(found) == expected


def test_arrays_with_an_address_are_not_copied_again() -> None:
    arrays = SharedArrays()
    array = arrays.put(np.arange(10))
    assert arrays.put(array[3:]).base is array.base and address_of(arrays.put(array[::2])) is not None
    np.testing.assert_array_equal(arrays.put(array[::2]), np.arange(10)[::2])
    assert address_of(np.arange(10)) is None and address_of(array.copy()) is None
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_files_of_many_arrays_are_found_in_one_call() -> None:
    one, two, own = SharedArrays(), SharedArrays(), np.arange(5)
    arrays = [one.put(np.arange(9)), own, two.put(np.arange(4)), one.put(np.arange(3000))[7:]]
    files, numbers, first = files_of(arrays)
    assert len(files) == 2 and numbers[1] == -1 and numbers[0] == numbers[3] != numbers[2]
    for index in (0, 2, 3):
        raw = files[numbers[index]].raw[first[index] : first[index] + arrays[index].nbytes]
        np.testing.assert_array_equal(raw.view(arrays[index].dtype), arrays[index])


def test_memory_and_descriptors_are_freed_with_the_last_reference() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    arrays = SharedArrays()
    kept = arrays.put(np.ones(3 << 20, np.uint8))
    address = address_of(kept)
    assert address is not None
    path = f"/proc/{address.pid}/fd/{address.fd}"
    more = [arrays.put(np.ones(3 << 20, np.uint8)) for _ in range(4)]
    assert num_held(path) == 15 << 20
    del more
    assert num_held(path) == 3 << 20
    del arrays
    assert num_held(path) == 3 << 20 and read_elsewhere([address]) == 3 << 20
    del kept
    gc.collect()
    assert not os.path.exists(path) or os.readlink(path) != "/memfd:megatron_rl_arrays (deleted)"
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("window", [1024, 512, 96])
def test_memory_held_per_live_byte_stays_near_one_however_long_responses_live(window: int) -> None:
    """Long-tailed responses grow by a window per step and leave at their end, as those of rollout workers do."""
    rng, worker = np.random.default_rng(0), Worker()

    def drawn() -> int:
        return int(np.clip(np.exp(rng.normal(np.log(4 * window), 0.9)), 16, 32 * window))

    totals, responses = [drawn() for _ in range(128)], [list[np.ndarray]() for _ in range(128)]
    shares = []
    for step in range(30):
        for slot in rng.permutation(128).tolist():
            left = totals[slot] - sum(len(part) for part in responses[slot]) // 8
            if not left:
                responses[slot], left = [], drawn()
                totals[slot] = left
            size = min(window, left)
            responses[slot].append(worker.write(np.zeros(size, np.int32), np.zeros(size, np.float32)))
        if step >= 20:
            live = sum(part.nbytes for parts in responses for part in parts)
            shares.append(os.fstat(worker.fd).st_blocks * 512 / live)
    # Extents of 16 MB held 6.2 bytes per live byte; a page has room for five windows of 96 tokens.
    assert np.mean(shares) <= {1024: 1.1, 512: 1.25, 96: 3.5}[window], np.mean(shares)


@pytest.mark.parametrize("seed", range(5))
def test_ranges_are_used_again_without_touching_live_ones(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_file, "FILE_BYTES", 64 * PAGE)
    rng, worker = random.Random(seed), Worker()
    kept: list[tuple[int, np.ndarray]] = []
    for number in range(3000):
        size = rng.choice([1, 100, 4096, 5000, 20_000])
        while sum(part.nbytes for _, part in kept) > 20 * PAGE:
            kept.pop(rng.randrange(len(kept)))
        kept.append((number % 251, worker.write(np.full(size, number % 251, np.uint8))))
        assert all((part == byte).all() for byte, part in kept)
    kept.clear()
    assert worker.held() == 0
    with pytest.raises(UserError, match=r"no range of .* bytes left"):
        worker.write(np.zeros(65 * PAGE, np.uint8))


def test_limited_address_space_is_an_error_with_its_remedy() -> None:
    code = "import resource; from megatron_rl.system.files.shared_file import SharedArrays; "
    code += "resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36)); SharedArrays()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "cannot map a shared file of 128 GiB" in done.stderr and "ulimit -v unlimited" in done.stderr


def test_a_later_writer_keeps_the_ranges_of_an_earlier_one_and_frees_them() -> None:
    worker = Worker()
    arrays = [worker.write(np.full(3 * PAGE, index, np.uint8)) for index in range(4)]
    again = SharedFile(worker.fd)
    worker.mapped.on_drop = again.free
    more = worker.mapped.at(again.put(memoryview(np.full(5000, 9, np.uint8))))
    assert [int(array[-1]) for array in arrays] == [0, 1, 2, 3] and (more == 9).all()
    arrays.pop(1)
    assert worker.held() == 9 * PAGE + 2 * PAGE
    arrays.clear()
    assert worker.held() == 2 * PAGE and (more == 9).all()


def test_a_missing_file_or_process_is_an_os_error() -> None:
    arrays = SharedArrays()
    address = address_of(kept := arrays.put(np.ones(5)))
    assert address is not None and len(kept) == 5
    for other in (address._replace(fd=10_000), address._replace(pid=2**22 + 1)):
        with pytest.raises(OSError):
            bytes_at(np.array([other]))


def test_a_file_that_has_taken_over_a_descriptor_is_mapped_anew() -> None:
    first = new_file("first")
    SharedFile(first).put(memoryview(b"first"))
    addresses = np.array([(os.getpid(), first, 0, 5)])
    (old,) = bytes_at(addresses)
    second = new_file("second")
    SharedFile(second).put(memoryview(b"other"))
    os.dup2(second, first)
    assert (bytes_at(addresses)[0].tobytes(), old.tobytes()) == (b"other", b"first")


def test_worker_arrays_stay_readable_after_the_worker_ends() -> None:
    """The address names the driver's mapping of a worker's file, not the worker."""
    worker = Worker()
    array = worker.write(np.full(100, 3, np.uint8))
    os.close(worker.fd)
    del worker
    gc.collect()
    address = address_of(array)
    assert address is not None and read_elsewhere([address]) == 300
