"""Vision-language models against transformers, and their images on several ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.config.schema import ParallelConfig, Recompute
from megatron_rl.data.batch import PackedBatch
from megatron_rl.desk.doctor.layout_comparison import check_invariance
from megatron_rl.errors import ModelError
from megatron_rl.families.parameters import VALUE_HEAD
from megatron_rl.models import critic, policy
from megatron_rl.models.conversion import convert
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.models.hf.weights import export_weights, load_weights
from megatron_rl.models.image_encoding import ADAPTER
from megatron_rl.parallel import topology
from tests.integration.preloaded import preloading
from tests.integration.torchrun import run_ranks
from tests.tiny_families import VISION_SHAPES, VISION_TOKENS, make_vision_model
from tests.vision_batches import hf_logits, load_vision_model, make_vision_batch

LAUNCH_TIMEOUT_S = 240
SHARD_BYTES = 50_000
by_shape = pytest.mark.parametrize("shape", VISION_SHAPES)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vision")
    return {shape: make_vision_model(folder / shape, shape) for shape in VISION_SHAPES}


@pytest.fixture
def single_rank() -> Iterator[ParallelConfig]:
    parallel = ParallelConfig()
    topology.initialize(parallel, seed=1)
    try:
        yield parallel
    finally:
        topology.destroy()


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def hf_gradients(model: Any) -> dict[str, Tensor]:
    """Tensors by parameter name, with stacked experts as in the files."""
    return {
        name: p.grad.transpose(1, 2) if ".experts." in name else p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def in_memory_name(name: str) -> str:
    """The files of Qwen2.5-VL use other tensor names than the model."""
    if name.startswith("visual."):
        return f"model.{name}"
    if name.startswith("model.") and not name.startswith(("model.visual.", "model.language_model.")):
        return name.replace("model.", "model.language_model.", 1)
    return name


@by_shape
def test_logits_and_gradients_equal_transformers(
    shape: str, models: dict[str, Path], single_rank: ParallelConfig
) -> None:
    config, model = load_hf_config(models[shape]), load_vision_model(models[shape])
    batch = make_vision_batch(config.vision_config)
    expected = hf_logits(model, batch)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    (weight * expected.log_softmax(-1)).sum().backward()
    gradients = hf_gradients(model)
    assert any("visual.merger" in name for name in gradients)
    for recompute in Recompute:
        (chunk,) = policy.build_policy(config, single_rank, dtype=torch.float32, seed=None, recompute=recompute)
        assert load_weights([chunk], config, models[shape]) == []
        assert sum(p.numel() for p in chunk.parameters()) == sum(p.numel() for p in model.parameters())
        assert_same_bits(dict(export_weights([chunk], config)), tensors_of(models[shape]))
        hidden = policy.forward(chunk, batch)[0]
        logits = hidden @ policy.head_weight(chunk)[: config.text_config.vocab_size].T
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        (weight * logits.log_softmax(-1)).sum().backward()
        with torch.no_grad():
            for parameter in chunk.parameters():
                parameter.copy_(parameter.grad)
        for name, gradient in export_weights([chunk], config):
            wanted = (
                gradients.pop(in_memory_name(name)) if recompute is Recompute.full else gradients[in_memory_name(name)]
            )
            largest, error = wanted.abs().max().item(), (gradient - wanted).abs().max().item()
            assert largest > 0 and error <= 2e-4 * largest, f"{recompute}, {name}: off by {error} of {largest}"
    assert not gradients


@by_shape
def test_images_and_text_do_not_attend_to_other_sequences(
    shape: str, models: dict[str, Path], single_rank: ParallelConfig
) -> None:
    config = load_hf_config(models[shape])
    (chunk,) = critic.build_critic(config, single_rank, dtype=torch.float32, seed=None)
    assert load_weights([chunk], config, models[shape], role="critic") == [VALUE_HEAD]
    batch = make_vision_batch(config.vision_config)
    with torch.no_grad():
        values = critic.token_values(chunk, policy.forward(chunk, batch), batch)
        for order in ([4, 2, 0], [1], [3, 1]):
            part = batch.select(order)
            alone = critic.token_values(chunk, policy.forward(chunk, part), part)
            expected = PackedBatch(batch.tokens, batch.cu_seqlens, {"values": values}).select(order).fields["values"]
            torch.testing.assert_close(alone, expected, atol=2e-5, rtol=0)


def test_video_tokens_are_refused_with_the_supported_format(
    models: dict[str, Path], single_rank: ParallelConfig
) -> None:
    config = load_hf_config(models["qwen3_vl"])
    (chunk,) = policy.build_policy(config, single_rank, dtype=torch.float32, seed=1)
    batch = make_vision_batch(config.vision_config)
    batch.tokens[0] = VISION_TOKENS["video_token_id"]
    with pytest.raises(ModelError, match="video tokens .* as its frames: one image each"):
        policy.forward(chunk, batch)


@by_shape
def test_a_round_trip_conversion_keeps_every_bit(shape: str, tmp_path: Path) -> None:
    source = make_vision_model(tmp_path / "hf", shape, dtype="bfloat16")
    there = convert(source, tmp_path / "megatron", to="megatron", max_shard_bytes=SHARD_BYTES)
    back = convert(tmp_path / "megatron", tmp_path / "back", to="hf", max_shard_bytes=SHARD_BYTES)
    assert there == back and there[2] == []
    assert_same_bits(tensors_of(tmp_path / "back"), tensors_of(source))
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 1


# Several ranks -------------------------------------------------------------------------------------------------------


def test_one_update_is_the_same_in_every_layout(models: dict[str, Path]) -> None:
    layouts = ["tp2+sp+ep2+etp1", "cp2+ep2", "pp2", "dp2"]
    with preloading():
        findings = check_invariance(str(models["qwen3_vl_moe"]), layouts)
    assert [finding.verdict for finding in findings] == ["reference", *["same"] * len(layouts)], findings


@pytest.fixture(scope="module")
def two_ranks(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Tensor]]:
    """Results of ``vision_worker.py``, and the weights that it started from."""
    folder, path = tmp_path_factory.mktemp("two_ranks"), models["qwen3_vl"]
    run_ranks(2, "tests.integration.vision_worker", path, folder, log=folder / "log.txt", timeout_s=LAUNCH_TIMEOUT_S)
    return torch.load(folder / "results.pt"), tensors_of(path)


def movement(found: dict[str, Tensor], before: dict[str, Tensor]) -> dict[str, float]:
    return {name: (found[name] - tensor).abs().max().item() for name, tensor in before.items()}


def test_the_rank_of_an_image_does_not_change_gradients(two_ranks: Any) -> None:
    results, before = two_ranks
    first, second = results["images on one rank"], results["images on both ranks"]
    assert first["norm"] == pytest.approx(second["norm"], rel=1e-5)
    moved = movement(first["weights"], before)
    for name, tensor in second["weights"].items():
        assert moved[name] > 0, name
        # The step is the gradient.
        error = (first["weights"][name] - tensor).abs().max().item()
        assert error <= 1e-3 * moved[name] + 1e-6 * tensor.abs().max().item(), f"{name}: {error} of {moved[name]}"


def test_frozen_parts_stay_unchanged_and_the_others_train(two_ranks: Any) -> None:
    results, before = two_ranks
    for run, learns in (
        ("frozen encoder", lambda name: name.startswith(ADAPTER)),
        ("frozen vision", lambda name: False),
    ):
        for name, moved in movement(results[run]["weights"], before).items():
            own = name.removeprefix("model.visual.")
            assert (moved > 0) == (own == name or learns(own)), name


def test_a_checkpoint_of_data_parallel_ranks_resumes_on_tensor_parallel_ranks(two_ranks: Any) -> None:
    results, _ = two_ranks
    assert_same_bits(results["resumed"]["weights"], results["images on both ranks"]["weights"])
