"""Laws of a Hugging Face folder that four ranks write together: every bit of every tensor once, whichever layout wrote it,
each rank its share; a disk that fills up, or a kill, leaves the folder before."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.saving_worker import FULL_RANK, LAYOUTS, LAYOUTS_OF, SHARD_BYTES
from tests.integration.torchrun import run_ranks
from tests.tiny_families import make_vision_model
from tests.tiny_models import make_tiny_model

NUM_RANKS = 4
DENSE, EXPERTS, STACKED = "qwen2", "qwen3_moe", "qwen3_vl_moe"
"""The last one's files hold all experts of a layer in one tensor."""
SAVED = [(model, layout) for model in (DENSE, EXPERTS, STACKED) for layout in LAYOUTS_OF.get(model, LAYOUTS)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saving")
    make_tiny_model(folder / "models" / DENSE, tie_word_embeddings=True, vocab_size=131)
    make_tiny_model(folder / "models" / EXPERTS, EXPERTS, num_experts=8)
    make_vision_model(folder / "models" / STACKED, STACKED)
    return folder


@pytest.fixture(scope="module")
def results(models: Path) -> dict[Any, Any]:
    run_ranks(NUM_RANKS, "tests.integration.saving_worker", models, log=models / "log.txt", timeout_s=200)
    return torch.load(models / "results.pt")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Through the index, as every reader finds them."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {file: load_file(folder / file) for file in set(index["weight_map"].values())}
    assert sorted(files) == sorted(path.name for path in folder.glob("*.safetensors"))
    assert sum(map(len, files.values())) == len(index["weight_map"])
    tensors = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    return tensors


@pytest.mark.parametrize(("model", "layout"), SAVED)
def test_the_files_have_every_bit_once_in_any_layout(
    model: str, layout: str, models: Path, results: dict[Any, Any]
) -> None:
    problem, written = results[model, layout]
    assert problem == ""
    folder, source = models / "saved" / f"{model}-{layout}", load_file(models / "models" / model / "model.safetensors")
    found = tensors_of(folder)
    assert found.keys() == source.keys() and all(torch.equal(found[name], source[name]) for name in source)
    assert all(path.stat().st_size < 2 * SHARD_BYTES or len(load_file(path)) == 1 for path in folder.glob("*.safetensors"))
    # Every rank writes, and none much more than its part of what it may write: a stage's, or a split of experts.
    total = sum(tensor.nbytes for tensor in source.values())
    largest = max(tensor.nbytes for tensor in source.values())
    assert sum(written) == total and min(written) > 0
    if model != STACKED:
        assert max(written) <= (total / 2 if "pp2" in layout else total / 4) + largest + SHARD_BYTES


@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_transformers_loads_a_folder_written_by_several_ranks(model: str, models: Path, results: dict[Any, Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = models / "saved" / f"{model}-tp2_sp_pp2"
    tokens = torch.arange(3, 20)[None]
    found, expected = (AutoModelForCausalLM.from_pretrained(f)(tokens).logits for f in (folder, models / "models" / model))
    assert torch.equal(found, expected)
    assert AutoTokenizer.from_pretrained(folder)("12+7")


@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_a_full_disk_on_one_rank_is_reported_on_all_and_keeps_the_previous_folder(
    model: str, models: Path, results: dict[Any, Any]
) -> None:
    problems = results[model, "full"]
    assert len(set(problems)) == 1 and f"rank {FULL_RANK}: [Errno 28] No space left on device" in problems[0]
    saved = models / "saved"
    assert f"{saved / model}-dp4 could not be written" in problems[0]
    tensors_of(saved / f"{model}-dp4")
    assert not [path.name for path in saved.iterdir() if path.name.startswith(".")]


def test_a_kill_during_a_save_keeps_the_previous_folder(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "models" / DENSE)
    with pytest.raises(AssertionError):
        run_ranks(NUM_RANKS, "tests.integration.saving_worker", tmp_path, "kill", log=tmp_path / "log.txt", timeout_s=100)
    found, original = tensors_of(tmp_path / "target"), load_file(source / "model.safetensors")
    assert found.keys() == original.keys() and all(torch.equal(found[name], original[name]) for name in original)
