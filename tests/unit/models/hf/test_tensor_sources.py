"""Contradictory folders of safetensors are rejected by name, by every reader."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.models.hf.tensor_sources import INDEX_FILE, SINGLE_FILE, CheckpointSource, WeightsError


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files: a and b in one, c in the other."""
    save_file({"a": torch.ones(2, 3), "b": torch.zeros(3)}, tmp_path / "one.safetensors")
    save_file({"c": torch.ones(4)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    return tmp_path


def add(file: Path, name: str, tensor: torch.Tensor) -> None:
    save_file({**load_file(file), name: tensor}, file)


def flip_header(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[12] ^= 0xFF
    file.write_bytes(content)


def test_complete_folder_is_read(folder: Path) -> None:
    source = CheckpointSource(folder)
    assert source.files == {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    assert source.read("c", (4,))[1:].tolist() == [1, 1, 1]
    assert source.read_whole("b").tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda f: (f / "two.safetensors").unlink(), "two.safetensors is missing, but .* lists it"),
        (lambda f: (f / "two.safetensors").write_bytes(b""), "two.safetensors is not a complete safetensors file"),
        (lambda f: (f / "one.safetensors").write_bytes((f / "one.safetensors").read_bytes()[:-4]), "not a complete"),
        (lambda f: flip_header(f / "one.safetensors"), "one.safetensors is not a complete safetensors file"),
        (
            lambda f: add(f / "two.safetensors", "a", torch.zeros(2, 3)),
            "a is in one.safetensors and in two.safetensors",
        ),
        (
            lambda f: write_index(f, {"a": "one.safetensors", "b": "one.safetensors", "c": "one.safetensors"}),
            "one.safetensors has no tensor c, .*index.json lists it there",
        ),
        (
            lambda f: write_index(f, {"a": "two.safetensors", "b": "one.safetensors", "c": "two.safetensors"}),
            "two.safetensors has no tensor a, .*; it is in one.safetensors",
        ),
        (lambda f: write_index(f, {"a": "../one.safetensors"}), "'../one.safetensors' is not the name of a file"),
        (lambda f: write_index(f, {"a": 1}), "not an object of tensor names and file names"),
        (lambda f: write_index(f, ["a"]), "not an object of tensor names and file names"),
        (lambda f: save_file({"a": torch.ones(2, 3)}, f / SINGLE_FILE), "has both model.safetensors and"),
    ],
)
def test_contradictory_folders_are_rejected(edit: Callable[[Path], None], message: str, folder: Path) -> None:
    edit(folder)
    with pytest.raises(WeightsError, match=message):
        CheckpointSource(folder)


def test_tensors_missing_from_the_index_are_found(folder: Path) -> None:
    write_index(folder, {"a": "one.safetensors", "c": "two.safetensors"})
    assert CheckpointSource(folder).files["b"] == "one.safetensors"


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn])
def test_quantized_weights_are_rejected_by_name_and_dtype(dtype: torch.dtype, folder: Path) -> None:
    add(folder / "two.safetensors", "c", torch.ones(4).to(dtype))
    with pytest.raises(WeightsError, match=r"two.safetensors: c is \w+: quantized weights are not supported; .* bfloat16"):
        CheckpointSource(folder).read("c", (4,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_weights_of_all_float_dtypes_are_read(dtype: torch.dtype, folder: Path) -> None:
    add(folder / "two.safetensors", "c", torch.ones(4).to(dtype))
    assert CheckpointSource(folder).read("c", (4,))[:].dtype == dtype


def test_folders_of_pickled_weights_are_reported_as_such(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="pickled weights"):
        CheckpointSource(tmp_path)
