"""bfloat16 on a real SGLang server and real Megatron Core: noise passes the gate, one wrong weight does not; ``doctor``.

One server for the whole file; ``doctor`` comes last, for it sends the server weights.
"""

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.algorithms.mismatch import mismatch_figures
from megatron_rl.cli import main
from megatron_rl.config.schema import Config, Dtype, ParallelConfig
from megatron_rl.data.batch import PackedBatch
from megatron_rl.data.trajectory import Prompt, Trajectory
from megatron_rl.parallel import topology as topologies
from megatron_rl.rollout.generation import GenerationPlan, Sampling
from megatron_rl.rollout.sglang.balance.client import SglangClient
from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.rollout.sglang.process.server import SglangServer
from megatron_rl.rollout.windows import WindowGenerator
from megatron_rl.step.packing import window_batch
from megatron_rl.step.parity import Parity, parity_bounds
from megatron_rl.training.engine import Engine
from tests.integration.preloaded import serving
from tests.tiny_models import make_tiny_model

NUM_PROMPTS, NUM_TOKENS = 16, 32


EXPERT_SCALE = 2.0
"""Experts that matter, as those of a trained model do."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes = dict(hidden_size=128, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, head_dim=32)
    make_tiny_model(folder, "qwen3_moe", dtype="bfloat16", **sizes)
    tensors = load_file(folder / "model.safetensors")
    scaled = {name: tensor * EXPERT_SCALE if ".experts." in name else tensor for name, tensor in tensors.items()}
    save_file(scaled, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = ServerOptions(str(model), dtype="bfloat16", deterministic=True)
    with serving(SglangServer(options, tmp_path_factory.mktemp("log") / "sglang.log", start_timeout_s=400.0)) as server:
        yield server.url


@pytest.fixture(scope="module")
def batch(url: str) -> PackedBatch:
    trajectories = [
        Trajectory(id=i, prompt=Prompt(str(i), tuple(range(5 + i, 20 + 2 * i))), group_id=i, sample_index=0,
                   max_response_tokens=NUM_TOKENS)
        for i in range(NUM_PROMPTS)
    ]
    plan = GenerationPlan(Sampling(temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(), seed=1), decode=str)

    async def generate() -> None:
        async with SglangClient([url], vocab_size=128) as client:
            window = WindowGenerator(client, None, plan, step=0, num_tokens=NUM_TOKENS, weight_version="default", kind="train")
            await window.generate(trajectories)

    asyncio.run(asyncio.wait_for(generate(), 200))
    return window_batch(trajectories, 0).joined()


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    place = topologies.initialize(ParallelConfig(), seed=1)
    yield Engine("policy", model, parallel=ParallelConfig(), topology=place, optimizer=None, dtype=Dtype.bfloat16)
    topologies.destroy()


def parity(engine: Engine, batch: PackedBatch, model: Path) -> Parity:
    config = Config()
    config.policy.path, config.policy.dtype = str(model), Dtype.bfloat16
    mask = batch.fields["mask"]
    (ours,) = engine.logprobs([batch])
    figures = mismatch_figures((ours - batch.fields["rollout_logprobs"])[mask])
    return Parity(figures, parity_bounds(config, on_gpu=False), int(mask.sum()))


def test_bfloat16_of_trainer_and_server_is_within_the_bounds(engine: Engine, batch: PackedBatch, model: Path) -> None:
    found = parity(engine, batch, model)
    assert found.num_tokens > 200 and found.too_large() == [], str(found)
    assert found.figures.max > 1e-3, "two engines in bfloat16 that agree to this are one engine"


def swapped(weight: Tensor) -> Tensor:
    return torch.cat(weight.chunk(2)[::-1])


@pytest.mark.parametrize(
    ("parameter", "change"),
    [
        ("layers.1.mlp.experts.local_experts.3.linear_fc1.weight", swapped),  # gate and up of one expert
        ("layers.1.mlp.router.weight", lambda weight: weight.roll(1, 0)),
        ("layers.0.pre_mlp_layernorm.weight", torch.ones_like),
        ("layers.0.self_attention.linear_qkv.weight", lambda weight: weight.roll(32, 0)),  # off by one head
    ],
)
def test_one_wrong_weight_exceeds_the_bounds(
    parameter: str, change: Callable[[Tensor], Tensor], engine: Engine, batch: PackedBatch, model: Path
) -> None:
    named = {name: tensor for chunk in engine.chunks for name, tensor in chunk.named_parameters()}
    (weight,) = (tensor for name, tensor in named.items() if name.endswith(parameter))
    before = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(change(before))
        found = parity(engine, batch, model)
        weight.copy_(before)
    assert found.too_large(), str(found)


def test_doctor_has_a_line_for_ranks_servers_weights_and_logprobs(
    url: str, model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    words = ["policy.dtype=bfloat16", f"rollout.urls=[{url}]", "batch.max_response_tokens=32"]
    status = main(["doctor", "--model", str(model), *words])
    output = capfd.readouterr().out
    assert status == 0, output
    for line in (
        "all-reduce of ranks +2 ranks on 1 node, gloo",
        f"SGLang's reply +attached to {url}",
        "weight sync +[0-9,]+ bytes",
        "weight checksums +[0-9]+ parameters compared with the trainer's: equal",
        "log-prob parity +[0-9]+ sampled tokens: mean difference",
    ):
        assert re.search(f"^OK +{line}", output, re.MULTILINE), output
    assert "mean difference" in output and "beyond ln 2" in output and "0 failed" in output
