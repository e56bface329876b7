"""Every family in awkward shapes against transformers, and ``megatron-rl convert`` there and back."""

import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.cli import main
from megatron_rl.config.schema import Dtype, Mtp, ParallelConfig
from megatron_rl.families.parameters import VALUE_HEAD
from megatron_rl.models import critic, policy
from megatron_rl.models.conversion import convert
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.models.hf.tensor_sources import INDEX_FILE, WeightsError
from megatron_rl.models.hf.weights import expected_names, export_weights, load_weights, save_hf
from megatron_rl.parallel import topology
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from megatron_rl.training.engine import Engine
from tests.integration.families_worker import COUNTED_LAYOUTS, LAYOUTS
from tests.integration.models_worker import pack
from tests.integration.torchrun import run_ranks
from tests.tiny_families import LINEAR_SHAPES, SHAPES, make_family_model
from tests.tiny_families import load_with_transformers as load_hf
from tests.tiny_models import make_tokenizer

declare_torchvision_ops()  # before any model of transformers is imported

LAUNCH_TIMEOUT_S = 240
LENGTHS = [9, 1, 60, 33, 17]
TEMPERATURE = 0.7
PARALLEL_SHAPES = (
    *("deepseek_v3_yarn", "kimi_k2", "glm4_moe_partial_rotary", "qwen3_moe_sparse_step", "qwen2_gqa7_tied", "gpt_oss"),
    *(shape for shape in LINEAR_SHAPES if shape in SHAPES),
)
LAYOUTS_OF = {shape: ("tp2_sp_ep2" if shape == "gpt_oss" else "tp2_sp", "pp2") for shape in PARALLEL_SHAPES}
"""Layouts in which outputs and gradients are compared; gpt_oss does not split an expert."""
SHARD_BYTES = 50_000

by_shape = pytest.mark.parametrize("shape", SHAPES)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {shape: make_family_model(folder / shape, shape) for shape in SHAPES}


@pytest.fixture
def single_rank() -> Iterator[ParallelConfig]:
    parallel = ParallelConfig()
    topology.initialize(parallel, seed=1)
    try:
        yield parallel
    finally:
        topology.destroy()


def make_sequences(vocab_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, vocab_size, (length,), generator=generator) for length in LENGTHS]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@by_shape
def test_logits_equal_transformers_and_no_tensor_is_lost(
    shape: str, models: dict[str, Path], single_rank: ParallelConfig
) -> None:
    config = load_hf_config(models[shape])
    (chunk,) = policy.build_policy(config, single_rank, dtype=torch.float32, seed=None)
    load_weights([chunk], config, models[shape])
    sequences, model = make_sequences(config.vocab_size), load_hf(models[shape])
    with torch.no_grad():
        hidden = policy.forward(chunk, pack(sequences))[0]
        logits = hidden @ policy.head_weight(chunk)[: config.vocab_size].T
        expected = torch.cat([model(tokens[None]).logits[0] for tokens in sequences])
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert_same_bits(dict(export_weights([chunk], config)), tensors_of(models[shape]))
    # Buffers are no parameters: the routers' biases.
    biases = sum(size[0] for name, size in expected_names(config, "policy").items() if name.endswith("correction_bias"))
    assert sum(p.numel() for p in chunk.parameters()) == sum(p.numel() for p in model.parameters())
    expected_numel = sum(torch.Size(size).numel() for size in expected_names(config, "policy").values())
    assert sum(p.numel() for p in chunk.parameters()) == expected_numel - biases


@pytest.mark.parametrize("shape", ["qwen2_gqa7_tied", "llama3_scaled"])
def test_an_fp32_head_equals_a_head_of_float32_copies(
    shape: str, models: dict[str, Path], single_rank: ParallelConfig
) -> None:
    config, batch = load_hf_config(models[shape]), pack(make_sequences(101))
    (chunk,) = policy.build_policy(config, single_rank, dtype=torch.bfloat16, fp32_head=True, seed=None)
    load_weights([chunk], config, models[shape])
    hidden = policy.forward(chunk, batch).detach().requires_grad_()
    assert hidden.dtype == policy.head_weight(chunk).dtype == torch.bfloat16
    head = policy.head_weight(chunk)
    logprobs, entropy = policy.token_logprobs(chunk, hidden, batch, temperature=TEMPERATURE)
    found = torch.autograd.grad(logprobs.sum() + 0.1 * entropy.sum(), [hidden, head])
    copies = [hidden[0].detach().float().requires_grad_(), head.detach().float().requires_grad_()]
    log_p = (copies[0] @ copies[1][: config.vocab_size].T / TEMPERATURE).log_softmax(-1)
    places = torch.cat([torch.arange(length - 1) + start for length, start in zip(LENGTHS, batch.cu_seqlens.tolist())])
    expected = log_p[places].gather(1, batch.tokens[places + 1, None])[:, 0]
    torch.testing.assert_close(logprobs[places + 1], expected, atol=1e-5, rtol=0)
    entropies = -(log_p.exp() * log_p).sum(-1)[places]
    torch.testing.assert_close(entropy[places + 1], entropies, atol=1e-5, rtol=0)
    wanted = torch.autograd.grad(expected.sum() + 0.1 * entropies.sum(), copies)
    for gradient, reference in zip((found[0][0], found[1]), wanted, strict=True):
        assert gradient.dtype == torch.bfloat16
        # Computed in float32 and rounded once.
        torch.testing.assert_close(gradient, reference.bfloat16(), atol=1e-4, rtol=2**-7)


# Two ranks -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """Results of two ranks, results of transformers, and the folder that the ranks saved."""
    folder = tmp_path_factory.mktemp("two_ranks")
    references, jobs = {}, {}
    for shape in PARALLEL_SHAPES:
        model, config = load_hf(models[shape]), load_hf_config(models[shape])
        sequences = make_sequences(config.vocab_size)
        weights = [torch.randn(len(tokens), generator=torch.Generator().manual_seed(3)) for tokens in sequences]
        logprobs, entropies, loss = [], [], 0.0
        for tokens, weight in zip(sequences, weights, strict=True):
            log_p = (model(tokens[None]).logits[0] / TEMPERATURE).log_softmax(-1)[:-1]
            start = torch.zeros(1)
            logprobs.append(torch.cat([start, log_p.gather(1, tokens[1:, None])[:, 0]]))
            entropies.append(torch.cat([start, -(log_p.exp() * log_p).sum(-1)]))
            loss = loss + (weight * logprobs[-1]).sum() + 0.1 * entropies[-1].sum()
        (loss / sum(LENGTHS)).backward()
        with torch.no_grad():
            # Saving takes experts apart as the files have them; handed gradients, it does the same for them.
            for parameter in model.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        model.save_pretrained(folder / "gradients" / shape)
        references[shape] = dict(
            logprobs=[t.detach() for t in logprobs],
            entropies=[t.detach() for t in entropies],
            gradients=tensors_of(folder / "gradients" / shape),
        )
        jobs[shape] = dict(path=str(models[shape]), sequences=sequences, weights=weights, layouts=LAYOUTS_OF[shape])
    torch.save(jobs, folder / "jobs.pt")
    torch.save({shape: str(path) for shape, path in models.items()}, folder / "models.pt")
    run_ranks(2, "tests.integration.families_worker", folder, log=folder / "log.txt", timeout_s=LAUNCH_TIMEOUT_S)
    return torch.load(folder / "results.pt"), references, folder


@pytest.mark.parametrize("layout", LAYOUTS | COUNTED_LAYOUTS)
def test_parameter_counts_over_all_ranks_equal_transformers(layout: str, two_ranks: Any, models: dict[str, Path]) -> None:
    counts, counted = two_ranks[0]["counts", layout], set()
    for shape, count in counts.items():
        if count is not None:
            sizes = expected_names(load_hf_config(models[shape]), "policy").values()
            buffers = sum(t.numel() for n, t in tensors_of(models[shape]).items() if n.endswith("correction_bias"))
            assert count == load_hf(models[shape]).num_parameters(), shape
            assert count == sum(torch.Size(size).numel() for size in sizes) - buffers, shape
            counted.add(SHAPES[shape]["model_type"])
    mixtures = {"qwen3_moe", "mixtral", "deepseek_v3", "kimi_k2", "glm4_moe"} | ({"gpt_oss"} if layout != "tp2_sp" else set())
    assert counted >= mixtures | ({"llama", "qwen2", "qwen3"} if "ep2" not in layout else set())


@pytest.mark.parametrize(("shape", "layout"), [(shape, layout) for shape, layouts in LAYOUTS_OF.items() for layout in layouts])
def test_two_ranks_equal_transformers_in_outputs_and_gradients(shape: str, layout: str, two_ranks: Any) -> None:
    results, references, _ = two_ranks
    found, reference = results[layout, shape], references[shape]
    for microbatches, outputs in found["outputs"]:
        for indices in microbatches:
            expected = torch.cat([reference[key][i] for key in ("logprobs", "entropies") for i in indices])
            torch.testing.assert_close(outputs[: len(expected)], expected, atol=1e-4, rtol=0)
            outputs = outputs[len(expected) :]
    for name, gradient in found["gradients"].items():
        expected = reference["gradients"][name]
        if not name.endswith("e_score_correction_bias"):
            largest, error = expected.abs().max().item(), (gradient - expected).abs().max().item()
            # The decay of linear attention is summed over a chunk before its exponential, in float32 on both sides.
            most = 3e-4 if ".linear_attn." in name else 1e-4
            assert largest > 0 and error <= most * largest, f"{name}: off by {error} of {largest}"


@pytest.mark.parametrize("shape", PARALLEL_SHAPES)
def test_a_checkpoint_of_tensor_parallel_ranks_converts_to_the_original_bits(
    shape: str, two_ranks: Any, models: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = two_ranks[2] / "checkpoints" / shape
    convert(checkpoint, tmp_path / "hf", to="hf", config_folder=models[shape], max_shard_bytes=SHARD_BYTES)
    assert_same_bits(tensors_of(tmp_path / "hf"), tensors_of(models[shape]))


# Conversion ----------------------------------------------------------------------------------------------------------


@by_shape
def test_a_round_trip_conversion_keeps_every_bit(shape: str, tmp_path: Path) -> None:
    source = make_family_model(tmp_path / "hf", shape, dtype="bfloat16")
    make_tokenizer(source)
    there = convert(source, tmp_path / "megatron", to="megatron", max_shard_bytes=SHARD_BYTES)
    back = convert(tmp_path / "megatron", tmp_path / "back", to="hf", max_shard_bytes=SHARD_BYTES)
    assert there == back and there[2] == []
    index = json.loads((tmp_path / "back" / INDEX_FILE).read_text())["weight_map"]
    assert len(set(index.values())) > 1 and index.keys() == tensors_of(source).keys()
    assert_same_bits(tensors_of(tmp_path / "back"), tensors_of(source))
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back"))
    assert before == after
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "megatron"]


def with_mxfp4(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """gpt_oss with experts in MXFP4, as on the hub; its folder, and its tensors as transformers reads them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source = make_family_model(folder, "gpt_oss", dtype="bfloat16", hidden_size=64, intermediate_size=96)
    tensors, stored, generator = tensors_of(source), {}, torch.Generator().manual_seed(4)
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(100, 140, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
        scales[0, 0] = torch.arange(columns // 32)  # the smallest exponents: numbers that bfloat16 stores without its first bit
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    return source, tensors


def test_mxfp4_experts_are_read_as_transformers_reads_them_and_written_in_bfloat16(tmp_path: Path) -> None:
    source, tensors = with_mxfp4(tmp_path / "hf")
    convert(source, tmp_path / "megatron", to="megatron", max_shard_bytes=SHARD_BYTES)
    convert(tmp_path / "megatron", tmp_path / "back", to="hf", max_shard_bytes=SHARD_BYTES)
    assert_same_bits(tensors_of(tmp_path / "back"), tensors)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    parallel = ParallelConfig()
    place = topology.initialize(parallel, seed=1)
    engine = Engine("policy", source, parallel=parallel, topology=place, optimizer=None, dtype=Dtype.bfloat16)
    assert_same_bits(dict(engine.export_weights()), tensors)
    topology.destroy()


@pytest.mark.parametrize("shape", ["deepseek_v3_yarn", "mixtral", "qwen2_gqa7_tied", "gpt_oss"])
def test_megatron_loads_a_converted_model(
    shape: str, models: dict[str, Path], single_rank: ParallelConfig, tmp_path: Path
) -> None:
    from megatron.core import dist_checkpointing

    topology.destroy()
    convert(models[shape], tmp_path / "megatron", to="megatron", max_shard_bytes=SHARD_BYTES)
    topology.initialize(single_rank, seed=1)
    config = load_hf_config(models[shape])
    (chunk,) = policy.build_policy(config, single_rank, dtype=torch.float32, seed=3)
    state = chunk.sharded_state_dict(metadata={"singleton_local_shards": False})
    chunk.load_state_dict(dist_checkpointing.load({"model": state}, str(tmp_path / "megatron"))["model"])
    assert_same_bits(dict(export_weights([chunk], config)), tensors_of(models[shape]))


def test_a_critic_is_converted_with_its_value_head(single_rank: ParallelConfig, tmp_path: Path) -> None:
    source = make_family_model(tmp_path / "hf", "deepseek_v3_yarn")
    config = load_hf_config(source)
    chunks = critic.build_critic(config, single_rank, dtype=torch.float32, seed=2)
    save_hf(chunks, config, source, tmp_path / "critic", role="critic")
    topology.destroy()
    convert(tmp_path / "critic", tmp_path / "megatron", to="megatron", max_shard_bytes=SHARD_BYTES)
    convert(tmp_path / "megatron", tmp_path / "back", to="hf", max_shard_bytes=SHARD_BYTES)
    assert VALUE_HEAD in tensors_of(tmp_path / "back")
    assert_same_bits(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "critic"))
    topology.initialize(single_rank, seed=1)


def with_mtp(folder: Path, shape: str) -> tuple[Path, dict[str, Tensor], dict[str, Tensor]]:
    """A model with a multi-token-prediction layer in two dtypes; its folder, its own tensors and the layer's."""
    source = make_family_model(folder, shape, num_nextn_predict_layers=1)
    tensors, generator = tensors_of(source), torch.Generator().manual_seed(9)
    extra = {
        "model.layers.2.eh_proj.weight": torch.randn(48, 96, generator=generator).bfloat16(),
        "model.layers.2.enorm.weight": torch.randn(48, generator=generator),
        "model.layers.2.mlp.gate.e_score_correction_bias": torch.randn(6, generator=generator).double(),
    }
    save_file({**tensors, **extra}, source / "model.safetensors", metadata={"format": "pt"})
    return source, tensors, extra


def num_mtp_layers(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"]


def test_conversion_refuses_keeps_or_drops_multi_token_prediction_by_name(tmp_path: Path) -> None:
    source, tensors, extra = with_mtp(tmp_path / "hf", "deepseek_v3_yarn")
    sizes = dict(max_shard_bytes=SHARD_BYTES)
    with pytest.raises(WeightsError, match="3 tensors .*model.layers.2.eh_proj.weight first.*--mtp keep.*--mtp drop"):
        convert(source, tmp_path / "dropped", to="megatron", **sizes)
    num_tensors, _, left_out = convert(source, tmp_path / "dropped", to="megatron", mtp=Mtp.drop, **sizes)
    assert set(left_out) == set(extra) and num_tensors == len(tensors)
    convert(tmp_path / "dropped", tmp_path / "without", to="hf", **sizes)
    assert_same_bits(tensors_of(tmp_path / "without"), tensors)
    assert num_mtp_layers(tmp_path / "without") == 0
    with pytest.raises(WeightsError, match="no tensors of multi-token-prediction layers to keep"):
        convert(tmp_path / "dropped", tmp_path / "out", to="hf", mtp=Mtp.keep, **sizes)

    there = convert(source, tmp_path / "kept", to="megatron", mtp=Mtp.keep, **sizes)
    with pytest.raises(WeightsError, match="choose how they are handled"):
        convert(tmp_path / "kept", tmp_path / "out", to="hf", **sizes)
    assert not (tmp_path / "out").exists()
    back = convert(tmp_path / "kept", tmp_path / "with", to="hf", mtp=Mtp.keep, **sizes)
    assert there == back and there[2] == [] and there[0] == len(tensors) + len(extra)
    assert_same_bits(tensors_of(tmp_path / "with"), {**tensors, **extra})
    assert num_mtp_layers(tmp_path / "with") == 1
    # What a run saved holds trained layers alone; the others come from the folder that it started from.
    convert(tmp_path / "dropped", tmp_path / "again", to="hf", config_folder=source, mtp=Mtp.keep, **sizes)
    assert_same_bits(tensors_of(tmp_path / "again"), {**tensors, **extra})


def test_a_policy_saves_multi_token_prediction_unchanged_or_drops_it(
    single_rank: ParallelConfig, tmp_path: Path
) -> None:
    source, tensors, extra = with_mtp(tmp_path / "hf", "glm4_moe_partial_rotary")
    topology.destroy()
    place = topology.initialize(single_rank, seed=1)
    engines = {
        mtp: Engine(
            "policy", source, parallel=single_rank, topology=place, optimizer=None, dtype=Dtype.bfloat16, mtp=mtp
        )
        for mtp in Mtp
    }
    # The bias that chooses experts moves by less than bfloat16 resolves.
    dtypes = {name: torch.float32 if name.endswith("correction_bias") else torch.bfloat16 for name in tensors}
    trained = {name: tensor.to(dtypes[name]) for name, tensor in tensors.items()}
    for mtp, engine in engines.items():
        engine.save_hf(tmp_path / mtp.value)
    assert_same_bits(tensors_of(tmp_path / "keep"), {**trained, **extra})
    assert num_mtp_layers(tmp_path / "keep") == 1
    assert_same_bits(tensors_of(tmp_path / "drop"), trained)
    assert load_hf_config(tmp_path / "drop").num_nextn_predict_layers == 0
    assert "3 tensors" in engines[Mtp.keep].mtp_note and "untrained" in engines[Mtp.keep].mtp_note
    assert "dropped" in engines[Mtp.drop].mtp_note
    assert dict(engines[Mtp.keep].export_weights()).keys() == tensors.keys()
    batch = pack(make_sequences(101))
    (logprobs,) = engines[Mtp.keep].logprobs([batch.with_fields(mask=torch.ones(len(batch.tokens), dtype=torch.bool))])
    assert logprobs.isfinite().all()
    with pytest.raises(WeightsError, match="nothing to keep; set policy.mtp=drop"):
        Engine("policy", tmp_path / "drop", parallel=single_rank, topology=place, optimizer=None, mtp=Mtp.keep)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def drop(name: str) -> Any:
    def edit(folder: Path) -> None:
        tensors = tensors_of(folder)
        del tensors[name]
        save_file(tensors, folder / "model.safetensors")

    return edit


def recast(folder: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file({**tensors_of(folder), name: tensors_of(folder)[name].half()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("edit", "options", "message"),
    [
        (lambda folder: cut(folder / "model.safetensors"), [], "model.safetensors is not a complete safetensors file"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 100), [], "model.safetensors is not a com"),
        (drop("model.layers.1.mlp.up_proj.weight"), [], "no tensor model.layers.1.mlp.up_proj.weight"),
        (recast, [], "model.layers.1.self_attn.k_proj.weight is torch.float16"),
        (lambda folder: (folder.parent / "out").mkdir(), [], "out exists"),
        (lambda folder: (folder.parent / "out").symlink_to("gone"), [], "out exists"),
        (lambda folder: (folder / "metadata.json").touch(), [], "is already a distributed checkpoint of Megatron"),
        (lambda folder: None, ["--mtp=keep"], "no tensors of multi-token-prediction layers to keep"),
        (lambda folder: None, ["--tensor-parallel-size=3"], "num_key_value_heads 2 does not divide .*size 3"),
        (lambda folder: None, ["--pipeline-parallel-size=2", "--config-from=/nowhere"], "/nowhere does not exist"),
    ],
    ids=["truncated", "garbage", "missing", "mixed dtypes", "output exists", "link exists", "megatron", "no mtp", "tp", "no config"],
)
def test_an_unconvertible_hugging_face_folder_is_a_one_line_error(
    edit: Any, options: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = make_family_model(tmp_path / "hf", "qwen3_wide_heads_yarn")
    edit(source)
    capfd.readouterr()
    code = main(["convert", f"--input={source}", f"--output={tmp_path / 'out'}", "--to=megatron", *options])
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    assert code == 2 and len(lines) == 1
    assert re.search(message, lines[0]), lines[0]
    assert not list(tmp_path.glob(".out.*"))


def fill_the_disk(*_: Any) -> None:
    # What torch.save says when a file ends before its bytes do.
    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598\nframe #0")


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("place", "failure", "code"),
    [
        ("torch_dist.write_common", fill_the_disk, 2),
        ("torch_dist.save_config", fill_the_disk, 2),
        ("conversion.copy_files", interrupt, 130),
    ],
)
def test_a_failed_conversion_leaves_no_output(
    place: str, failure: Any, code: int, tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"megatron_rl.models.{place}", failure)
    arguments = ["convert", f"--input={models['qwen3_wide_heads_yarn']}", f"--output={tmp_path / 'out'}"]
    assert main([*arguments, "--to=megatron"]) == code
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_that_is_killed_leaves_no_target_and_can_be_repeated(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed as if by SIGKILL: nothing is cleaned up, not even the temporary folder."""
    monkeypatch.setattr("megatron_rl.models.hf.folder.shutil.rmtree", lambda *args, **kwargs: None)
    monkeypatch.setattr("megatron_rl.models.conversion.copy_files", interrupt)
    source, target = models["qwen3_wide_heads_yarn"], tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        convert(source, target, to="megatron", max_shard_bytes=SHARD_BYTES)
    assert not target.exists() and list(tmp_path.glob(".out.*"))
    monkeypatch.undo()
    convert(source, target, to="megatron", max_shard_bytes=SHARD_BYTES)
    convert(target, tmp_path / "back", to="hf", max_shard_bytes=SHARD_BYTES)
    assert_same_bits(tensors_of(tmp_path / "back"), tensors_of(source))


def lose_key(folder: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    metadata = FileSystemReader(folder).read_metadata()
    del metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def reshape_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda folder: cut(folder / "__0_0.distcp"), r"__0_0.distcp: \S+ cannot be read"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), r"__0_0.distcp: \S+ cannot be read.*No such file"),
        (lambda folder: cut(folder / ".metadata"), r".metadata is damaged"),
        (lambda folder: (folder / "metadata.json").unlink(), "has no metadata.json"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json; .*--config-from"),
        (lose_key, "no tensor decoder.layers.mlp.linear_fc2.weight, from which model.layers.0.mlp.down_proj.weight"),
        (reshape_model, r"decoder.layers.mlp.linear_fc1.weight has shape .*160.* requires .*192"),
    ],
    ids=["truncated", "gone", "metadata", "no checkpoint", "no config", "missing tensor", "other shapes"],
)
def test_an_unconvertible_megatron_checkpoint_is_a_one_line_error(
    edit: Any, message: str, tmp_path: Path, models: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "megatron"
    convert(models["qwen3_wide_heads_yarn"], source, to="megatron", max_shard_bytes=SHARD_BYTES)
    edit(source)
    capfd.readouterr()
    code = main(["convert", f"--input={source}", f"--output={tmp_path / 'out'}", "--to=hf"])
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    assert code == 2 and len(lines) == 1
    assert re.search(message, lines[0]), lines[0]
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]
