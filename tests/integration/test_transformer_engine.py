"""Every family through Transformer Engine's real Python classes, on two ranks, against this project's own layers on one.

The kernels are plain PyTorch (``tests/te_stand_ins.py``), so this shows that specs, names, loading, export, calls and the
wiring of ranks are right for the versions of Transformer Engine that are pinned; it shows nothing of its kernels.
"""

import contextlib
import itertools
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.schema import LoraConfig, MoeConfig, ParallelConfig, Recompute, RoutingReplay
from megatron_rl.errors import UserError
from megatron_rl.parallel import topology
from tests.integration.te_worker import LAYOUTS, LEARNING_RATE, run_job, write_weights
from tests.integration.torchrun import REPOSITORY, run_ranks
from tests.odd_models import odd_config
from tests.tiny_families import COMMON, SHAPES, VISION_SHAPES


def pinned(file: str) -> list[str]:
    lines = (REPOSITORY / "requirements" / file).read_text().splitlines()
    return [line.split("==")[1].split()[0] for line in lines if line.startswith("transformer_engine==")]


VERSIONS = pinned("transformer_engine.txt")
"""The last is the one of GPU machines. Of the others, the newest that Megatron Core 0.16.1 asks for and one between, which images
have, a few models are enough."""
FEW = ("qwen2_gqa7_tied", "qwen3_wide_heads_yarn", "mixtral", "deepseek_v3_yarn", "glm4_moe_partial_rotary", "qwen3_vl_moe")
ODD = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "qwen2_5_vl", "qwen3_vl_moe")
"""Families of which a random shape is taken."""
LAUNCH_TIMEOUT_S = 240
OVERLAPPING = ("qwen2_gqa7_tied", "mixtral", "deepseek_v3_yarn")
ADAPTED = {
    "qwen3_wide_heads_yarn": ("tp2_sp", "cp2"), "qwen2_gqa7_tied": ("tp2_sp",),
    "mixtral": ("ep2", "dp2"), "deepseek_v3_yarn": ("ep2",),
}  # fmt: skip
"""Layouts of the models that train adapters."""
REPLAYED = ("qwen3_moe", "glm4_moe_partial_rotary")
RECOMPUTED = ("qwen3_wide_heads_yarn", "qwen3_moe", "deepseek_v3_yarn", "qwen3_vl")


def wheel(version: str) -> Path:
    folder = Path(sys.prefix) / "share/transformer_engine" / version
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing: bash launch/setup.sh unpacks Transformer Engine's Python there")
    return folder


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("te_models")
    shapes = {name: {**COMMON, **shape} for name, shape in SHAPES.items()} | VISION_SHAPES
    jobs = {name: make_job(folder / name, shape, ("tp2_sp", "cp2")) for name, shape in shapes.items()}
    for name in FEW:
        jobs[name]["layouts"] += ("dp2", "ep2") if jobs[name]["experts"] else ("dp2",)
    # Its experts are never split.
    jobs["gpt_oss"]["layouts"] = ("dp2", "ep2", "tp2_ep2")
    for name in ("mixtral", "glm4_moe_partial_rotary"):
        jobs[name]["layouts"] += ("tp2_ep2",)
    for family in ODD:
        for seed in itertools.count(50):
            # Some of these are meant to be refused.
            with contextlib.suppress(UserError):
                job = make_job(folder / f"{family}_{seed}", odd_config(family, seed), ("dp2", "cp2"))
                jobs[f"odd_{family}"] = job
                break
    for name in OVERLAPPING:
        jobs[name] |= {"layouts": (*jobs[name]["layouts"], "dp2_overlap"), "saves": True}
    for name, layouts in ADAPTED.items():
        # A step must show, although it moves B alone.
        lora = LoraConfig(rank=4, alpha=400.0, targets=["all-linear", *(["experts.*"] if "ep2" in layouts else [])])
        jobs[f"{name}_lora"] = {**jobs[name], "layouts": layouts, "lora": lora, "saves": False}
    replay = MoeConfig(routing_replay=RoutingReplay.R2)
    for name in REPLAYED:
        jobs[f"{name}_replay"] = {**jobs[name], "layouts": ("tp2_sp", "ep2"), "moe": replay}
    for name in RECOMPUTED:
        jobs[f"{name}_selective"] = {**jobs[name], "layouts": ("tp2_sp",), "recompute": Recompute.selective}
        jobs[f"{name}_full"] = {**jobs[name], "layouts": ("tp2_sp",), "recompute": Recompute.full}
    return jobs


def make_job(folder: Path, config: dict[str, Any], layouts: tuple[str, ...]) -> dict[str, Any]:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, seed=len(str(folder)))
    experts = any("expert" in field for field in config.get("text_config", config))
    return {"path": str(folder), "layouts": layouts, "experts": experts}


@pytest.fixture(scope="module")
def own_layers(jobs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    parallel = ParallelConfig()
    ranks = topology.initialize(parallel, seed=1)
    try:
        return {name: run_job(job, parallel, ranks) for name, job in jobs.items()}
    finally:
        topology.destroy()


Results = dict[str, dict[str, Any]]
"""{layout: {model: what it gave}}"""


@pytest.fixture(scope="module")
def results_of(
    jobs: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Results]:
    """Version -> what its layers gave; each is launched when first asked for."""

    @cache
    def of(version: str) -> Results:
        folder, sources = tmp_path_factory.mktemp("te"), wheel(version)
        few = {name: {**jobs[name], "layouts": ("tp2_sp",)} for name in FEW}
        torch.save(jobs if version == VERSIONS[-1] else few, folder / "jobs.pt")
        run_ranks(
            2,
            "tests.integration.te_worker",
            folder,
            log=folder / "log.txt",
            timeout_s=LAUNCH_TIMEOUT_S,
            launcher=("tests.integration.te_ranks", sources),
        )
        return torch.load(folder / "results.pt", weights_only=False)

    return of


@pytest.fixture
def results(results_of: Callable[[str], Results]) -> Results:
    return results_of(VERSIONS[-1])


CASES = [(VERSIONS[-1], layout) for layout in LAYOUTS] + [(version, "tp2_sp") for version in VERSIONS[:-1]]


@pytest.mark.parametrize("version,layout", CASES)
def test_every_model_with_transformer_engine_equals_the_plain_layers(
    version: str, layout: str, results_of: Callable[[str], Results], own_layers: dict[str, Any]
) -> None:
    compared, results = [], results_of(version)
    for name, found in results[layout].items():
        expected = own_layers[name]
        if isinstance(found, str):
            # Everything fits on one rank.
            assert layout in ("tp2_sp", "ep2") and "does not divide" in found, (name, found)
            continue
        assert found["lost"] == [] == found["not_resumed"], name
        difference = (found["logprobs"] - expected["logprobs"]).abs().max()
        assert difference < 2e-4, (name, float(difference))
        # With experts, a near tie may fall differently after a step.
        off = (found["logprobs_after"] - expected["logprobs_after"]).abs() > 1e-3
        assert off.float().mean() < 0.05, (name, int(off.sum()))
        assert (found["logprobs_after"] - found["logprobs"]).abs().mean() > 1e-3, name
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-4), name
        for weight, tensor in expected["stepped"].items():
            off = (found["stepped"][weight] - tensor).abs().max()
            assert off < 0.02 * LEARNING_RATE, (name, weight, float(off))
        compared.append(name)
    assert len(compared) >= max(3, 0.7 * len(results[layout]))


def test_the_transformer_engine_version_of_the_gpu_lock_is_tested() -> None:
    assert pinned("gpu.txt") in ([], VERSIONS[-1:])


def test_overlap_of_communication_changes_no_bit(results: Results) -> None:
    """The sum of two ranks' gradients is the same whichever bucket it is taken in."""
    for name, found in results["dp2_overlap"].items():
        expected = results["dp2"][name]
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
        assert torch.equal(found["logprobs"], expected["logprobs"]), name
        difference = (found["logprobs_after"] - expected["logprobs_after"]).abs().max()
        assert difference < 1e-5, (name, float(difference))


def test_expert_kernels_are_used_unless_routes_are_recorded_or_replayed(
    results: Results, own_layers: dict[str, Any]
) -> None:
    for layout, name in (("dp2", "mixtral"), ("tp2_sp", "deepseek_v3_yarn"), ("ep2", "glm4_moe_partial_rotary")):
        called = set(results[layout][name]["called"])
        assert {"grouped_linear", "attention", "fused_topk_with_score_function", "moe_unpermute"} <= called, called
    for name in REPLAYED:
        for layout in ("tp2_sp", "ep2"):
            found = results[layout][f"{name}_replay"]
            assert "fused_topk_with_score_function" not in found["called"] and "moe_unpermute" in found["called"]
            assert torch.equal(found["routes"], own_layers[f"{name}_replay"]["routes"])


def test_recomputation_keeps_fewer_activations_and_changes_no_logprob(results: Results) -> None:
    found = results["tp2_sp"]
    for name in RECOMPUTED:
        none, selective, full = found[name], found[f"{name}_selective"], found[f"{name}_full"]
        assert torch.equal(selective["logprobs"], none["logprobs"]) and torch.equal(full["logprobs"], none["logprobs"])
        assert full["kept_bytes"] < 0.95 * selective["kept_bytes"] < 0.95 * 0.95 * none["kept_bytes"], name


def test_transformer_engine_is_absent_from_the_rest_of_the_suite() -> None:
    import megatron.core.extensions.transformer_engine as extensions

    assert not extensions.HAVE_TE and "transformer_engine" not in sys.modules
