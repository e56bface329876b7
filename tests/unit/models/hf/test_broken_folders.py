"""Every reader loads a broken model folder or rejects it with the file and the field."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatron_rl.config.checks.model_settings import folder_problems
from megatron_rl.config.schema import Config, ParallelConfig
from megatron_rl.errors import UserError
from megatron_rl.models.conversion import convert
from megatron_rl.models.hf.megatron_config import check_layout, megatron_config
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.models.hf.tensor_sources import INDEX_FILE, SINGLE_FILE, CheckpointSource, WeightsError
from megatron_rl.models.hf.weights import checked_source, unread_tensors_note
from tests.fuzz import mutated, mutated_bytes, mutations, taken_or_refused
from tests.tiny_families import COMMON, SHAPES, VISION_SHAPES, make_family_model

CONFIGS: dict[str, dict[str, Any]] = {
    **{name: {**COMMON, **shape} for name, shape in SHAPES.items()},
    **VISION_SHAPES,
    "old_names": {
        **COMMON,
        "model_type": "llama",
        "rope_theta": 1e4,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
}


def write(folder: Path, text: str | bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(text.encode(errors="surrogatepass") if isinstance(text, str) else text)
    return folder


def read_by_all(folder: Path) -> None:
    """Read the folder as convert, doctor and Engine do, and as the check of a recipe does."""
    config = Config()
    config.policy.path = str(folder)
    list(folder_problems(config, "train"))
    hf_config = load_hf_config(folder)
    check_layout(hf_config, ParallelConfig())
    megatron_config(hf_config, ParallelConfig(), dtype=torch.float32)


def refusal(folder: Path, **fields: Any) -> str:
    config = {**CONFIGS["qwen3_moe"], **fields}
    with pytest.raises(UserError) as error:
        read_by_all(write(folder, json.dumps(config)))
    assert str(folder) in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("num_attention_heads", [0, -4, 2.5, "4", [4], None, True, 10**30]),
        ("num_hidden_layers", [0, -1, 10**9, "2", {}]),
        ("decoder_sparse_step", [0, -1, "1"]),
        ("hidden_size", [0, -48, "big", None]),
        ("vocab_size", [0, "101", [], 10**20]),
        ("rms_norm_eps", [0, -1e-6, float("nan"), float("inf"), "1e-6", None]),
        ("rope_theta", [0, -1.0, float("inf"), "10000"]),
        ("num_experts_per_tok", [0, -2, "2", 1.5]),
        ("tie_word_embeddings", ["false", 1, []]),
        ("mlp_only_layers", ["0", [-1], [0.5], {"0": 1}]),
        ("model_type", [["qwen2"], {}, 5, None, "mamba"]),
        ("rope_scaling", ["linear", [1], {"type": 5}, {"rope_type": "linear", "factor": -2}]),
    ],
)
def test_impossible_config_fields_are_rejected_by_name(field: str, values: list[Any], tmp_path: Path) -> None:
    for value in values:
        assert field in refusal(tmp_path / "model", **{field: value}), value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "not a JSON object"),
        ('{"model_type": "qwen2", "model_type": "llama"}', "'model_type' occurs twice"),
        (b"\xff\xfe{}", "not a JSON object"),
        ('{"model_type": "qwen2", "hidden_size": ' + "1" * 5000 + "}", "not a JSON object"),
        ("", "not a JSON object"),
        ("null", "not a JSON object, but a NoneType"),
    ],
)
def test_config_files_must_be_one_json_object(text: str | bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="config.json is") as error:
        read_by_all(write(tmp_path / "model", text))
    assert words in str(error.value)


@mutations(250)
@given(data=st.data())
def test_broken_configs_load_or_raise_a_model_error(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = data.draw(mutated(CONFIGS[data.draw(st.sampled_from(sorted(CONFIGS)))], at_most=2))
    folder = write(Path(tmp_path_factory.getbasetemp()) / "broken_config", json.dumps(config))
    with taken_or_refused("config.json"):
        read_by_all(folder)


@mutations(100)
@given(data=st.data())
def test_damaged_config_bytes_load_or_raise_a_model_error(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = json.dumps(CONFIGS[data.draw(st.sampled_from(sorted(CONFIGS)))]).encode()
    folder = write(Path(tmp_path_factory.getbasetemp()) / "damaged_config", data.draw(mutated_bytes(text)))
    with taken_or_refused("config.json"):
        read_by_all(folder)


# Weights --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    shapes = {"tied": "qwen2_gqa7_tied", "untied": "llama3_scaled", "latent": "deepseek_v3_yarn"}
    return {name: make_family_model(folder / name, shape) for name, shape in shapes.items()}


@pytest.fixture
def tied(models: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(models["tied"], tmp_path / "tied"))


def add(folder: Path, name: str, tensor: torch.Tensor) -> None:
    save_file({**load_file(folder / SINGLE_FILE), name: tensor}, folder / SINGLE_FILE, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_head_may_be_a_copy_but_not_another_head(
    tied: Path, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = load_hf_config(tied)
    embedding = load_file(tied / SINGLE_FILE)["model.embed_tokens.weight"].to(dtype)
    add(tied, "model.embed_tokens.weight", embedding)
    add(tied, "lm_head.weight", embedding.clone().float())
    checked_source(config, tied, "policy")
    head = embedding.clone().float()
    head[-1, -1] += 1
    add(tied, "lm_head.weight", head)
    with pytest.raises(
        WeightsError, match="lm_head.weight differs from model.embed_tokens.weight.*tie_word_embeddings=false"
    ):
        checked_source(config, tied, "policy")
    with pytest.raises(WeightsError, match="lm_head.weight differs"):
        convert(tied, tmp_path / "out", to="megatron", max_shard_bytes=10**9)
    assert not (tmp_path / "out").exists()
    # Accepted for a critic, which has no such head, so that no weights are lost.
    checked_source(config, tied, "critic")


def test_unread_tensors_are_reported_and_unknown_ones_rejected(tied: Path) -> None:
    config = load_hf_config(tied)
    add(tied, "score.weight", torch.ones(1, config.hidden_size))
    add(tied, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(3))
    for role, words in (("policy", "a policy has no use for it"), ("critic", "starts with a fresh value head")):
        checked_source(config, tied, role)
        assert words in unread_tensors_note(config, tied, role)
    add(tied, "model.layers.0.self_attn.q_norm.weight", torch.ones(6))
    with pytest.raises(WeightsError, match=r"does not have: model.layers.0.self_attn.q_norm.weight"):
        checked_source(config, tied, "policy")


def test_empty_tensors_are_ignored(tied: Path) -> None:
    add(tied, "model.layers.0.mlp.shared_experts.gate_proj.weight", torch.ones(0, 84))
    checked_source(load_hf_config(tied), tied, "policy")


def edit_header(file: Path, edit: Any) -> None:
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.dumps(edit(json.loads(content[8 : 8 + size]))).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + size :])


def read_weights(folder: Path) -> None:
    config = load_hf_config(folder)
    source, _ = checked_source(config, folder, "policy")
    for name in source.files:
        source.read_whole(name)


@mutations(150)
@given(data=st.data())
def test_inconsistent_headers_are_read_or_rejected(
    data: st.DataObject, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = Path(tmp_path_factory.getbasetemp()) / "lying"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(models[data.draw(st.sampled_from(["tied", "untied", "latent"]))], folder)
    file = folder / SINGLE_FILE
    if data.draw(st.booleans()):
        edit_header(file, lambda header: data.draw(mutated(header, at_most=2)))
    else:
        file.write_bytes(data.draw(mutated_bytes(file.read_bytes())))
    with taken_or_refused(str(folder)):
        read_weights(folder)


@mutations(100)
@given(data=st.data())
def test_broken_indices_are_read_or_rejected(
    data: st.DataObject, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = Path(tmp_path_factory.getbasetemp()) / "index"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(models["tied"], folder)
    (folder / SINGLE_FILE).rename(folder / "model-00001-of-00001.safetensors")
    names = list(load_file(folder / "model-00001-of-00001.safetensors"))
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (folder / INDEX_FILE).write_text(json.dumps(data.draw(mutated(index))))
    if data.draw(st.integers(0, 3)) == 0:
        (folder / INDEX_FILE).write_bytes(data.draw(mutated_bytes(json.dumps(index).encode())))
    with taken_or_refused(str(folder)):
        read_weights(folder)


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "../x.safetensors", "/etc/passwd", "a/..", "x\0y"])
def test_index_may_list_only_files_of_its_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(WeightsError, match="is not the name of a file in its folder"):
        CheckpointSource(tmp_path)
