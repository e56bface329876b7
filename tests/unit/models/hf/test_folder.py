"""Laws of planned safetensors files: safetensors reads them for any order of dtypes, and writers have even loads."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from megatron_rl.families.parameters import TensorSpec
from megatron_rl.models.hf.folder import RankWriter, cut, least_loaded, part_path

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
headers = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=12).map(
    lambda items: [TensorSpec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(items)]
)


def values_of(header: TensorSpec) -> torch.Tensor:
    return torch.randn(header.shape, dtype=torch.float64).to(header.dtype)


@given(headers, st.integers(1, 200))
def test_written_shards_are_bit_equal_when_read(tmp_path_factory: pytest.TempPathFactory, planned: list[TensorSpec], most: int):
    folder = tmp_path_factory.mktemp("shards")
    files = cut(planned, most)
    assert [header for file in files for header in file] == planned
    assert all(len(file) == 1 or sum(header.num_bytes for header in file) <= most for file in files)
    writer, tensors = RankWriter(folder, 3, files), {header.name: values_of(header) for header in planned}
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.close()
    assert writer.num_bytes == writer.total_bytes == sum(tensor.nbytes for tensor in tensors.values())
    found = {}
    for index, file in enumerate(files):
        path = part_path(folder, 3, index)
        assert path.stat().st_size >= sum(header.num_bytes for header in file)
        with safe_open(path, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        found |= load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_views_and_parameters_are_written_by_value(tmp_path: Path):
    whole = torch.arange(12, dtype=torch.float32).view(3, 4)
    parameter = torch.nn.Parameter(whole.clone())
    tensors = {"transposed": whole.t(), "column": whole[:, 1], "parameter": parameter}
    planned = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    writer = RankWriter(tmp_path, 0, [planned])
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.close()
    found = load_file(part_path(tmp_path, 0, 0))
    assert all(torch.equal(found[name], tensor.detach()) for name, tensor in tensors.items())


def test_unplanned_tensors_and_disk_failures_raise(tmp_path: Path):
    writer = RankWriter(tmp_path, 0, [[TensorSpec("a", (2,), torch.float32)]])
    writer.add("a", torch.zeros(3))
    with pytest.raises(ValueError, match=r"a was planned as torch.float32 \(2,\), got torch.float32 \(3,\)"):
        writer.close()
    writer = RankWriter(tmp_path / "missing", 0, [[TensorSpec("a", (2,), torch.float32)]])
    writer.add("a", torch.zeros(2))
    with pytest.raises(OSError, match="missing"):
        writer.close()


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 8), st.integers(1, 200))
def test_writer_loads_differ_by_at_most_the_least_bytes(sizes: list[int], num_ranks: int, least: int):
    loads = [0] * num_ranks
    for size in sizes:
        loads[least_loaded(loads, range(num_ranks), least)] += size
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= least + max(sizes)
    # The writing ranks come first, and a rank starts only after its predecessor has at least ``least`` bytes.
    busy = sum(load > 0 for load in loads)
    assert all(loads[:busy]) and all(load >= least for load in loads[: busy - 1])
