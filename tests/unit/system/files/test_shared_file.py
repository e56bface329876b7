"""An array of a shared file has one address everywhere; its memory and descriptors are freed with the last reference.
"""

import gc
import os
import subprocess
import sys

import numpy as np
import pytest

from megatron_rl.system.files.shared_file import Address, MappedFiles, SharedArrays, SharedFile, SharedView, address_of

READER = """
import sys
from megatron_rl.system.files.shared_file import Address, MappedFiles, Place
numbers = list(map(int, sys.argv[1:]))
files = MappedFiles()
print(sum(sum(files.at(Address(pid, fd, Place(*place)))) for pid, fd, *place in zip(*[iter(numbers)] * 6)))
"""


def read_elsewhere(addresses: list[Address]) -> int:
    """Sum of all bytes of the arrays, as read by another process."""
    numbers = [str(number) for pid, fd, place in addresses for number in (pid, fd, *place)]
    return int(subprocess.run([sys.executable, "-c", READER, *numbers], check=True, capture_output=True).stdout)


def num_held(path: str) -> int:
    """Bytes of memory that a file occupies."""
    gc.collect()
    return os.stat(path).st_blocks * 512


def test_other_processes_read_views_of_any_kind_at_their_addresses() -> None:
    arrays, rng = SharedArrays(), np.random.default_rng(1)
    kept, found, expected = [], [], 0
    for shape in ((5,), (3000, 7), (2_000_000,), (40, 3, 2)):
        array = arrays.put(rng.integers(0, 90, shape).astype(np.int16))
        for view in (array, array[1:-1], array[2:3], array.view()):
            address = address_of(view)
            assert address is not None and address.place.num_bytes == view.nbytes
            kept.append(view)
            found.append(address)
            expected += int(view.view(np.uint8).astype(np.int64).sum())
    assert read_elsewhere(found) == expected


def test_array_with_an_address_is_not_copied_again() -> None:
    arrays = SharedArrays()
    array = arrays.put(np.arange(10))
    assert arrays.put(array[3:]).base is array.base and address_of(arrays.put(array[::2])) is not None
    np.testing.assert_array_equal(arrays.put(array[::2]), np.arange(10)[::2])
    assert address_of(np.arange(10)) is None and address_of(array.copy()) is None
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_memory_and_descriptors_are_freed_with_the_last_reference() -> None:
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


def test_reading_a_file_that_is_gone_raises() -> None:
    arrays = SharedArrays()
    address = address_of(arrays.put(np.ones(5)))
    assert address is not None
    with pytest.raises(OSError):
        MappedFiles().at(address._replace(fd=10_000))
    with pytest.raises(OSError):
        MappedFiles().at(address._replace(pid=2**22 + 1))


def test_worker_arrays_stay_readable_after_the_worker_ends() -> None:
    """The driver's view of a worker's file is addressed by the driver's process, not the worker's."""
    fd = os.memfd_create("worker")
    worker, view = SharedFile(fd), SharedView(fd, lambda start: None)
    array = np.frombuffer(view.at(worker.put(memoryview(np.full(100, 3, np.uint8)))), np.uint8)
    del worker, view
    os.close(fd)
    gc.collect()
    address = address_of(array)
    assert address is not None and read_elsewhere([address]) == 300
