"""Ranks on another machine fetch the arrays at given addresses from a separate process, if they have the secret."""

import os
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest

from megatron_rl.data.rows import FileId, Rows
from megatron_rl.errors import UserError
from megatron_rl.parallel.array_server import ArrayServerAddress, Reachability, read_arrays, start_array_server
from megatron_rl.system.files.shared_file import NODE, SharedArrays, address_of


def addresses_of(arrays: list[np.ndarray]) -> np.ndarray:
    found = [address_of(array) for array in arrays]
    return np.array([one for one in found if one is not None]).reshape(-1, 4)


@pytest.fixture(scope="module")
def service():
    before = set(psutil.Process().children())
    service = start_array_server("127.0.0.1")
    yield service
    (server,) = set(psutil.Process().children()) - before
    server.kill()
    server.wait()
    with pytest.raises(UserError, match="could not be fetched from"):
        list(read_arrays(addresses_of([SharedArrays().put(np.ones(3))]), service))


def test_arrays_of_any_size_arrive_in_order(service: ArrayServerAddress) -> None:
    shared = SharedArrays()
    sizes = [*np.random.default_rng(2).integers(1, 50_000, 40).tolist(), (1 << 24) + 9, 7, 1 << 20]
    arrays = [shared.put(np.arange(size, dtype=np.int64).astype(np.uint8)) for size in sizes]
    arrays += [arrays[3][10:100], arrays[-1][5:]]
    np.testing.assert_array_equal(np.concatenate(list(read_arrays(addresses_of(arrays), service))), np.concatenate(arrays))
    assert list(read_arrays(addresses_of([]), service)) == []


def test_requests_without_the_secret_and_for_freed_arrays_are_errors(service: ArrayServerAddress) -> None:
    array = SharedArrays().put(np.ones(3))
    with pytest.raises(UserError, match="another secret"):
        list(read_arrays(addresses_of([array]), service._replace(secret="00" * 32)))
    gone = addresses_of([array])
    gone[0, 1] = 10_000
    with pytest.raises(UserError, match="could not be fetched from"):
        list(read_arrays(gone, service))


def test_the_array_server_ends_with_its_parent() -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:  # no test code but this runs there
        before = set(psutil.Process().children())
        start_array_server("127.0.0.1")
        (server,) = set(psutil.Process().children()) - before
        os.write(writing, str(server.pid).encode())
        os._exit(0)
    os.waitpid(child, 0)
    server_pid, until = int(os.read(reading, 20)), time.monotonic() + 20
    while psutil.pid_exists(server_pid) and psutil.Process(server_pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "it is still there"
        time.sleep(0.05)
    os.close(reading)
    os.close(writing)


def test_pieces_of_several_nodes_are_joined_in_order(service: ArrayServerAddress) -> None:
    """Pieces on the reader's own node are mapped; those of another node are fetched in one request."""
    random, shared = np.random.default_rng(4), SharedArrays()
    for _ in range(5):
        sizes = random.integers(0, 3000, random.integers(1, 30))
        arrays = [shared.put(random.integers(0, 100, (size, 2)).astype(np.int16)) for size in sizes if size]
        rows, nodes = Rows.of([[array] for array in arrays]), random.integers(0, 3, len(arrays))
        # The same file under the number of each node.
        (file,) = rows.files
        files = [FileId(NODE * node + file.pid, file.fd) for node in range(3)]
        table = rows.table.copy()
        table[:, 0] = nodes
        found = replace(rows, files=files, table=table).fetched(Reachability(1, False, {0: service, 2: service}).read)
        assert found.lengths.tolist() == [len(array) for array in arrays]
        np.testing.assert_array_equal(found.packed(), np.concatenate([np.zeros((0, 2), np.int16), *arrays]))
