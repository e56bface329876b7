"""Models on a GPU compared with the same models on the CPU; skipped without a GPU.

The comparisons are those of tools/gpu_validate.py: a GPU in bfloat16 may be a few times as far from the CPU's float32 as
the CPU in bfloat16 is.
"""

import argparse
import importlib.util
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).parents[2] / "tools"
DEADLINE_S = 900.0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(4 * DEADLINE_S),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_transformer_engine = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
)


@pytest.fixture(autouse=True)
def tools_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TOOLS)


def arguments(**fields: object) -> argparse.Namespace:
    from gpu_validate import parser

    return argparse.Namespace(**{**vars(parser().parse_args([])), "deadline_s": DEADLINE_S, **fields})


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe"])
def test_logprobs_and_one_update_equal_the_cpus(family: str, tmp_path: Path) -> None:
    from gpu_validate import Section, parity

    section = Section("parity")
    parity(section, arguments(families=family), tmp_path)
    assert section.failures == [] and [row["verdict"] for row in section.rows] == ["same"]


@pytest.mark.parametrize("model", ["tiny-dense", "tiny-moe"])
def test_training_steps_are_finite_and_take_memory(model: str, tmp_path: Path) -> None:
    from gpu_validate import Section, training

    section = Section("training")
    training(section, arguments(models=model, tiny=True, num_ranks=1), tmp_path)
    assert section.failures == []
    assert section.rows[0]["peak_gib"] > 0 and section.rows[0]["tokens_per_s"] > 0


def test_a_server_receives_every_weight(tmp_path: Path) -> None:
    from gpu_validate import Section, weight_sync

    section = Section("weight_sync")
    weight_sync(section, arguments(tiny=True), tmp_path)
    assert section.failures == [] and {row["cuda_graphs"] for row in section.rows} == {"on"}


def test_tppo_runs_end_to_end(tmp_path: Path) -> None:
    from gpu_validate import Section, tppo

    section = Section("tppo")
    tppo(section, arguments(tiny=True), tmp_path)
    assert section.rows[0]["steps"] == 3


@needs_transformer_engine
@pytest.mark.parametrize("fp8", ["hybrid", "e4m3"])
def test_8_bit_products_stay_near_bfloat16(fp8: str, tmp_path: Path) -> None:
    import gpu_sections
    from gpu_sections import PARITY_LENGTHS, SMALL, write_model

    from megatron_rl.config.schema import Dtype, Fp8, Init, ParallelConfig
    from megatron_rl.desk.doctor.layout_ranks import OPTIMIZER, make_batch
    from megatron_rl.parallel import topology
    from megatron_rl.training.engine import Engine

    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit products")
    folder = write_model(tmp_path / "model", {**SMALL, **gpu_sections.FAMILIES["qwen3_moe"]})
    batch = make_batch(list(PARITY_LENGTHS), SMALL["vocab_size"], "policy", 1, 0)
    place, found = topology.initialize(ParallelConfig(), seed=1), {}
    try:
        for choice in (Fp8.none, Fp8(fp8)):
            engine = Engine(
                "policy",
                folder,
                parallel=ParallelConfig(),
                topology=place,
                optimizer=OPTIMIZER,
                init=Init.random,
                dtype=Dtype.bfloat16,
                fp8=choice,
            )
            (logprobs,) = engine.logprobs([batch])
            result = engine.update([batch], gpu_sections.supervised(batch))
            found[choice] = (logprobs.float().cpu(), result.grad_norm)
    finally:
        topology.destroy()
    (plain, plain_norm), (small, small_norm) = found.values()
    assert not torch.equal(plain, small)
    assert (plain - small).abs().mean() < 0.1
    assert small_norm == pytest.approx(plain_norm, rel=0.2)
