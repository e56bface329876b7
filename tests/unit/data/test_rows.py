"""Rows equal lists of arrays under every operation, wherever their memory is."""

import pickle
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.rows import Rows
from megatron_rl.system.files.shared_file import NODE, ArrayRange, MappedFile, SharedArrays, bytes_at

SHARED = SharedArrays()
KINDS = [(np.int32, ()), (np.float32, ()), (np.uint8, (2, 3)), (np.int16, (4,)), (np.bool_, ())]
Arrays = list[list[np.ndarray]]


@st.composite
def columns(draw: Callable) -> tuple[Arrays, np.ndarray]:
    """(pieces by sequence, in own and in shared memory, some of them of several sequences, no row)."""
    dtype, shape = draw(st.sampled_from(KINDS))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    prompt = rng.integers(0, 2, (3, *shape)).astype(dtype)

    def piece(kind: str, size: int) -> np.ndarray:
        values = rng.integers(0, 99, (size, *shape)).astype(dtype)
        part = SHARED.put(np.concatenate([prompt, values]))[2:]
        return {"own": values, "shared": SHARED.put(values), "part": part, "prompt": prompt}[kind]

    pieces = st.lists(st.tuples(st.sampled_from(["own", "shared", "part", "prompt"]), st.integers(0, 5)), max_size=4)
    found = [[piece(*one) for one in of] for of in draw(st.lists(pieces, max_size=6))]
    return found, np.zeros((0, *shape), dtype)


def joined(arrays: list[np.ndarray], like: np.ndarray) -> np.ndarray:
    return np.concatenate([like, *arrays])


def assert_same(rows: Rows, expected: Arrays, like: np.ndarray) -> None:
    whole = [joined(arrays, like) for arrays in expected]
    assert len(rows) == len(expected) and rows.lengths.tolist() == list(map(len, whole))
    found = rows.packed()
    np.testing.assert_array_equal(found, joined(whole, like))
    assert found.dtype == like.dtype and found.flags.writeable and rows.num_bytes == found.nbytes


def sent(rows: Rows) -> Rows:
    return pickle.loads(pickle.dumps(rows, protocol=5))


@given(columns(), st.data())
def test_selected_and_joined_columns_are_those_of_the_arrays(column: tuple[Arrays, np.ndarray], data: st.DataObject) -> None:
    arrays, like = column
    rows = Rows.of(arrays, like)
    assert_same(rows, arrays, like)
    indices = data.draw(st.lists(st.integers(0, len(arrays) - 1), max_size=8)) if arrays else []
    chosen = [arrays[index] for index in indices]
    assert_same(rows.select(indices), chosen, like)
    assert_same(Rows.concatenated([rows.select(indices), rows]), chosen + arrays, like)


@given(columns(), st.data())
def test_rows_arrive_the_same_by_address_by_bytes_and_from_other_nodes(column: tuple[Arrays, np.ndarray], data: st.DataObject) -> None:
    arrays, like = column
    indices = data.draw(st.lists(st.integers(0, len(arrays) - 1), max_size=8)) if arrays else []
    chosen, rows = [arrays[index] for index in indices], Rows.of(arrays, like).select(indices)
    shared = rows.shared(SHARED)
    assert all(isinstance(shared.files[number], MappedFile) for number in shared.table[:, 0]), "each piece has an address"
    for one in (rows, shared):
        assert_same(sent(one).mapped(), chosen, like)
        assert_same(sent(sent(one)).mapped(), chosen, like)
        reads: list[int] = []
        assert_same(sent(sent(one).fetched(reader(reads))), chosen, like)
        assert set(reads) == sent(one).all_nodes


def reader(reads: list[int]) -> Callable[[int, np.ndarray], np.ndarray]:
    def read(node: int, addresses: np.ndarray) -> np.ndarray:
        reads.append(node)
        return np.concatenate(bytes_at(addresses))

    return read


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), max_size=6), st.booleans())
def test_tokens_without_a_row_are_zero(parts: list[tuple[int, int, int]], is_shared: bool) -> None:
    """Each sequence has tokens before its rows, rows, and tokens behind them."""
    starts, sizes, rest = (np.array([part[i] for part in parts], np.int64) for i in range(3))
    lengths, numbers = starts + sizes + rest, np.arange(1, sum(p[1] for p in parts) + 1, dtype=np.float32)
    ends = np.cumsum(sizes)
    rows = Rows.flat(numbers, ends - sizes, ends, starts if starts.any() else None)
    kept = rows.shared(SHARED) if is_shared else rows  # whoever sends addresses keeps the memory
    rows = sent(kept).mapped()
    parts_of = zip(starts, sizes, rest, ends, strict=True)
    expected = [np.concatenate([np.zeros(s), numbers[e - n : e], np.zeros(r)]) for s, n, r, e in parts_of]
    np.testing.assert_array_equal(rows.packed(lengths), np.concatenate([np.zeros(0), *expected]))
    order = np.arange(len(parts))[::-1]
    np.testing.assert_array_equal(rows.select(order).packed(lengths[order]), np.concatenate([np.zeros(0), *expected[::-1]]))
    twice = Rows.concatenated([rows, rows.select(order)])
    np.testing.assert_array_equal(
        twice.packed(np.concatenate([lengths, lengths[order]])), np.concatenate([np.zeros(0), *expected, *expected[::-1]])
    )


def test_a_message_has_addresses_and_of_own_memory_only_the_selected_rows_once() -> None:
    prompt, large = np.arange(1000, dtype=np.int32), np.arange(100_000, dtype=np.int32)
    rows = Rows.of([[prompt, SHARED.put(large)], [prompt, large], [prompt]])
    assert len(pickle.dumps(rows.select([0, 2, 2, 0]))) < prompt.nbytes + 1500
    assert len(pickle.dumps(rows.shared(SHARED))) < 1500
    assert len(pickle.dumps(rows.select([1]))) > large.nbytes


def test_rows_of_another_node_have_lengths_and_nodes_without_being_read() -> None:
    remote = MappedFile.remote(3 * NODE + 7, 5)
    there = remote.at(ArrayRange(64, 24)).view(np.int32)
    rows = Rows.of([[np.ones(2, np.int32), there], [there], [SHARED.put(np.ones(4, np.int32))], []])
    assert rows.nodes.tolist() == [0, 3, 0, -1] and rows.lengths.tolist() == [8, 6, 4, 0] and rows.all_nodes == {0, 3}
    arrived = sent(rows)
    assert arrived.nodes.tolist() == [0, 3, 0, -1]
    with pytest.raises(OSError):
        arrived.select([1]).mapped()
    found = arrived.select([0]).fetched(lambda node, addresses: np.full(addresses[0, 3], node, np.uint8))
    np.testing.assert_array_equal(found.packed(), [1, 1, *[0x03030303] * 6])


def test_rows_keep_their_memory_alive() -> None:
    arrays = SharedArrays()
    rows = Rows.of([[arrays.put(np.arange(50_000, dtype=np.int32))]])
    flat = np.arange(5.0)
    column = Rows.flat(flat, np.array([0, 2]), np.array([2, 5])).shared(arrays)
    del arrays, flat
    assert rows.packed()[-1] == 49_999 and column.packed().tolist() == [0, 1, 2, 3, 4]
