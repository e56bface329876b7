"""Laws of the weight-sync plan: buckets, ranks, coverage."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.weights.bucket_plan import (
    _MAX_NAMES_SHOWN,
    Coverage,
    CoverageError,
    GroupSpec,
    ServerAddress,
    TensorSpec,
    place,
)

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64]

shapes = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)
spec_lists = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=40).map(
    lambda pairs: [TensorSpec(f"layer.{i}", shape, dtype) for i, (shape, dtype) in enumerate(pairs)]
)


def place_all(specs: list[TensorSpec], bucket_bytes: int) -> list[tuple[int, int]]:
    """(bucket, end) of each tensor."""
    placed: list[tuple[int, int]] = []
    for spec in specs:
        placed.append(place(spec, placed[-1] if placed else None, bucket_bytes))
    return placed


def by_bucket(specs: list[TensorSpec], bucket_bytes: int) -> list[list[tuple[TensorSpec, int]]]:
    """The tensors of each bucket, with their ends."""
    grouped: list[list[tuple[TensorSpec, int]]] = []
    for spec, (bucket, end) in zip(specs, place_all(specs, bucket_bytes), strict=True):
        if bucket == len(grouped):
            grouped.append([])
        grouped[bucket].append((spec, end))
    return grouped


@given(spec_lists, st.integers(1, 400))
def test_tensors_are_placed_once_and_in_order(specs, bucket_bytes):
    assert [spec for bucket in by_bucket(specs, bucket_bytes) for spec, _ in bucket] == specs
    indices = [bucket for bucket, _ in place_all(specs, bucket_bytes)]
    # Buckets are numbered without gaps and only the last is being filled, so streaming is possible.
    assert all(later - earlier in (0, 1) for earlier, later in itertools.pairwise(indices))
    assert indices[:1] in ([], [0])


@given(spec_lists, st.integers(1, 400))
def test_tensors_are_contiguous_and_aligned_inside_a_bucket(specs, bucket_bytes):
    for bucket in by_bucket(specs, bucket_bytes):
        position = 0
        for spec, end in bucket:
            assert position % spec.dtype.itemsize == 0
            position += spec.num_bytes
            assert end == position


@given(spec_lists, st.integers(1, 400))
def test_only_a_single_oversized_tensor_exceeds_the_bucket_size(specs, bucket_bytes):
    for bucket in by_bucket(specs, bucket_bytes):
        assert bucket[-1][1] <= bucket_bytes or len(bucket) == 1


@given(spec_lists, st.integers(1, 400))
def test_bucket_is_closed_only_if_the_next_tensor_does_not_fit(specs, bucket_bytes):
    for bucket, following in itertools.pairwise(by_bucket(specs, bucket_bytes)):
        (_, end), (first, _) = bucket[-1], following[0]
        too_large = end + first.num_bytes > bucket_bytes
        unaligned = end % first.dtype.itemsize != 0
        assert too_large or unaligned


def test_unaligned_tensor_opens_a_new_bucket():
    odd = TensorSpec("odd", (3,), torch.bfloat16)
    wide = TensorSpec("wide", (1,), torch.float32)
    assert [bucket for bucket, _ in place_all([odd, wide], 1000)] == [0, 1]
    assert [bucket for bucket, _ in place_all([wide, odd], 1000)] == [0, 0]


def test_scalar_tensor_has_the_bytes_of_one_item():
    assert TensorSpec("scale", (), torch.float32).num_bytes == 4


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_bucket_size_of_zero_is_rejected(bucket_bytes):
    with pytest.raises(ValueError, match="bucket_bytes"):
        place(TensorSpec("weight", (1,), torch.float32), None, bucket_bytes)


def test_empty_tensors_are_rejected_for_publishing():
    with pytest.raises(ValueError, match="without elements"):
        place(TensorSpec("empty", (3, 0), torch.float32), None, 100)


def group_of(tp_sizes: list[int]) -> GroupSpec:
    servers = tuple(ServerAddress(f"http://server{i}", tp_size, 1) for i, tp_size in enumerate(tp_sizes))
    return GroupSpec("group", servers, "gloo", 1.0)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=10))
def test_server_ranks_follow_the_source_without_gaps(tp_sizes):
    group = group_of(tp_sizes)
    ranks = [0] + [first + i for first, tp_size in zip(group.first_ranks, tp_sizes, strict=True) for i in range(tp_size)]
    assert ranks == list(range(group.world_size))


@pytest.mark.parametrize("tp_sizes", [[], [1, 0]])
def test_groups_without_workers_are_rejected(tp_sizes):
    with pytest.raises(ValueError, match="tp_size"):
        group_of(tp_sizes)


EXPECTED = {"embed": (8, 4), "norm": (4,)}
EMBED, NORM = TensorSpec("embed", (8, 4), torch.float32), TensorSpec("norm", (4,), torch.float32)


def check_coverage(specs: list[TensorSpec], expected: dict[str, tuple[int, ...]]) -> None:
    """Check a whole stream as a publish does."""
    coverage = Coverage(expected)
    for spec in specs:
        coverage.add(spec)
    coverage.check(complete=True)


def test_exact_coverage_passes():
    check_coverage([NORM, EMBED], EXPECTED)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([EMBED], "missing: norm"),
        ([EMBED, NORM, TensorSpec("head", (1,), torch.float32)], "unexpected: head"),
        ([EMBED, NORM, NORM], "duplicate: norm"),
        ([TensorSpec("embed", (4, 8), torch.float32), NORM], r"wrong shape: embed \[4, 8\], the model has \[8, 4\]"),
    ],
)
def test_coverage_reports_wrong_tensors_by_name(specs, message):
    with pytest.raises(CoverageError, match=message):
        check_coverage(specs, EXPECTED)


def test_coverage_reports_all_kinds_of_problems_together():
    with pytest.raises(CoverageError, match=r"unexpected: head.*duplicate: head.*missing: embed, norm"):
        check_coverage([TensorSpec("head", (1,), torch.float32)] * 2, EXPECTED)


def test_incomplete_stream_is_rejected_only_for_bad_tensors():
    coverage = Coverage(EXPECTED)
    coverage.add(NORM)
    coverage.check(complete=False)
    coverage.add(TensorSpec("head", (1,), torch.float32))
    with pytest.raises(CoverageError, match="unexpected: head"):
        coverage.check(complete=False)


def test_empty_stream_is_rejected_without_expected_names():
    with pytest.raises(CoverageError, match="empty"):
        Coverage().check(complete=True)


def test_long_lists_of_names_are_shortened_with_a_count():
    expected = {f"layer.{i:02d}": (1,) for i in range(_MAX_NAMES_SHOWN + 3)}
    with pytest.raises(CoverageError, match="layer.08 and 2 more"):
        check_coverage([TensorSpec("layer.00", (1,), torch.float32)], expected)
