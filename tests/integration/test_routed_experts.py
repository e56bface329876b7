"""R3 on a real SGLang server and real Megatron Core: what the engine says of its routing is what the trainer replays.

One server for the whole file; the training runs come last, for they send it other weights.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.config.schema import Init, MoeConfig, ParallelConfig, RoutingReplay
from megatron_rl.data.batch import ROUTES, PackedBatch, cu_seqlens_of
from megatron_rl.data.trajectory import Prompt, Trajectory
from megatron_rl.parallel import topology as topologies
from megatron_rl.rollout.generation import GenerationPlan, Sampling
from megatron_rl.rollout.requests import RouteShape
from megatron_rl.rollout.sglang.balance.client import SglangClient
from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.rollout.sglang.process.server import SglangServer
from megatron_rl.rollout.sglang.wire.response_validation import route_shape
from megatron_rl.rollout.windows import WindowGenerator
from megatron_rl.step.packing import window_batch, window_routes, with_routes
from megatron_rl.tracking.metrics_file import read_metrics
from megatron_rl.training.engine import Engine
from tests.integration.preloaded import preloading, serving
from tests.same_runs import differences
from tests.tiny_families import make_family_model
from tests.tiny_models import make_tokenizer

WINDOW_TOKENS = 12
NUM_TRAJECTORIES = 6
TOLERANCE = 1e-4
RECIPE = """
run: {{num_steps: 3, seed: 5}}
policy:
  path: {model}
  dtype: float32
  moe: {{load_balancing: aux_loss, aux_loss_coef: 0.01}}
  optimizer: {{lr: 1.0e-3, warmup_steps: 0}}
critic: {{warmup_steps: 0, optimizer: {{lr: 1.0e-3}}}}
parallel: {{collective_timeout_s: 120}}
batch:
  num_prompts_per_step: 4
  num_samples_per_prompt: 4
  max_prompt_tokens: 16
  max_response_tokens: 20
  window_tokens: 0
  policy_minibatch_size: 8
  critic_minibatch_size: 8
  max_tokens_per_microbatch: 256
algorithm: {{ignore_boundary_tokens: 2}}
data: {{train_files: ["{folder}/train.jsonl"], use_chat_template: false, system_prompt: ""}}
reward: {{name: "tests.integration.preset_reward:even_length", num_workers: 1}}
rollout: {{urls: ["{url}"]}}
tracking: {{mlflow: false}}
"""
RUNS = {
    "tppo": ["policy.moe.routing_replay=R3", "batch.window_tokens=8", "critic.warmup_steps=1"],
    "grpo": ["policy.moe.routing_replay=R2", "policy.recompute=full"],
}
"""Preset and what it is run with."""
TWO_NODES = '''
"""Rank 1 on a node of its own: its processes and those of rank 0 cannot map each other's files."""
import os, sys
from pathlib import Path

if "RANK" in os.environ:
    from megatron_rl.system.files import shared_file

    os.environ["LOCAL_RANK"] = "0"
    opened = shared_file.map_file

    def file(pid, fd):
        if f"RANK={os.environ['RANK']}".encode() not in Path(f"/proc/{pid % shared_file.NODE}/environ").read_bytes().split(bytes(1)):
            raise FileNotFoundError(f"process {pid} is on another node")
        return opened(pid, fd)

    shared_file.map_file = file
    if os.environ["RANK"] == "0" and not any("workers" in word or "array_server" in word for word in sys.orig_argv):
        from megatron_rl.rollout.workers import worker_pool

        class OnTheOtherNode(worker_pool.WorkerPool):
            def __init__(self, *args):
                super().__init__(*args)
                self._sites.reverse()  # the one server there is, is the other node's

        worker_pool.WorkerPool = OnTheOtherNode
'''


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    # SGLang takes every layer of this family for sparse and its head for a matrix of its own.
    sizes = dict(num_hidden_layers=3, num_experts=8, num_experts_per_tok=2, tie_word_embeddings=False)
    # Without an end-of-text token every window is full.
    make_tokenizer(folder)
    return make_family_model(folder, "qwen3_moe", eos_token_id=None, **sizes)


@pytest.fixture(scope="module")
def url(model_path, tmp_path_factory) -> Iterator[str]:
    options = ServerOptions(str(model_path), deterministic=True, returns_routes=True)
    with serving(SglangServer(options, tmp_path_factory.mktemp("log") / "sglang.log", start_timeout_s=400.0)) as server:
        yield server.url


@pytest.fixture(scope="module")
def windows(model_path, url) -> list[PackedBatch]:
    """The batches of two steps, each with the engine's log-probs and routes."""
    shape = route_shape(model_path)
    assert shape == RouteShape(num_layers=3, top_k=2, num_experts=8)
    trajectories = [
        Trajectory(
            id=i,
            prompt=Prompt(str(i), tuple(range(5 + i, 12 + 3 * i))),
            group_id=i,
            sample_index=0,
            max_response_tokens=2 * WINDOW_TOKENS,
        )
        for i in range(NUM_TRAJECTORIES)
    ]
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(), seed=1, routes=shape)

    async def generate() -> list[PackedBatch]:
        batches = []
        async with SglangClient([url], vocab_size=101) as client:
            plan = GenerationPlan(sampling, decode=str)
            for step in range(2):
                window = WindowGenerator(
                    client, None, plan, step=step, num_tokens=WINDOW_TOKENS, weight_version="default", kind="train"
                )
                await window.generate(trajectories)
                batches.append(with_routes(window_batch(trajectories, step), window_routes(trajectories, step)).joined())
        return batches

    return asyncio.run(asyncio.wait_for(generate(), 120))


@pytest.fixture(scope="module")
def engine(model_path):
    parallel = ParallelConfig()
    place = topologies.initialize(parallel, seed=1)
    try:
        yield Engine(
            "policy",
            model_path,
            parallel=parallel,
            topology=place,
            optimizer=None,
            init=Init.checkpoint,
            moe=MoeConfig(routing_replay=RoutingReplay.R3),
        )
    finally:
        topologies.destroy()


def ends(batch: PackedBatch) -> torch.Tensor:
    """[T] bool: the last token of each sequence."""
    is_end = torch.zeros(len(batch.tokens), dtype=torch.bool)
    is_end[batch.cu_seqlens[1:] - 1] = True
    return is_end


def test_all_tokens_but_the_last_have_a_record(windows):
    for batch in windows:
        routes = batch.fields[ROUTES]
        assert routes.shape == (len(batch.tokens), 3, 2)
        assert (routes > 0).all(-1).all(-1).equal(~ends(batch))
        assert (routes[ends(batch)] == 0).all()


def test_the_record_of_a_window_covers_earlier_windows(windows):
    first, second = windows
    for row in range(NUM_TRAJECTORIES):
        earlier, later = first.select([row]), second.select([row])
        known = len(earlier.tokens) - 1
        assert len(later.tokens) == len(earlier.tokens) + WINDOW_TOKENS
        # The weights are the same, so the choices are.
        found, expected = later.fields[ROUTES][:known], earlier.fields[ROUTES][:known]
        assert torch.equal(found.sort(-1).values, expected.sort(-1).values)


def test_server_and_trainer_choose_the_same_experts(windows, engine):
    for batch in windows:
        own = batch.only("mask")
        engine.logprobs([own], record_routes=True)
        (routes,) = engine.pop_routes()
        known = ~ends(batch)
        assert torch.equal(routes.sort(-1).values[known], batch.fields[ROUTES].sort(-1).values[known])


def test_replaying_the_servers_routes_gives_its_logprobs_and_shuffled_routes_do_not(windows, engine):
    for batch in windows:
        mask, rollout = batch.fields["mask"], batch.fields["rollout_logprobs"]
        (replayed,) = engine.logprobs([batch])
        assert (replayed - rollout)[mask].abs().max() < TOLERANCE
        order = torch.from_numpy(np.random.default_rng(3).permutation(len(mask)))
        (shuffled,) = engine.logprobs([batch.with_fields(**{ROUTES: batch.fields[ROUTES][order]})])
        assert (shuffled - rollout)[mask].abs().mean() > 0.1


def test_a_batch_of_one_token_sequences_needs_no_record(engine):
    tokens = torch.tensor([4, 9, 7])
    batch = PackedBatch(tokens, cu_seqlens_of(torch.tensor([1, 2])), {"mask": torch.tensor([False, False, True])})
    (native,) = engine.logprobs([batch])
    (empty,) = engine.logprobs([batch.with_fields(**{ROUTES: torch.zeros(3, 3, 2, dtype=torch.int16)})])
    assert torch.equal(native, empty)


@pytest.fixture(scope="module")
def runs(windows, model_path, url, tmp_path_factory) -> tuple[Path, str]:
    """(output folder, what was printed) after one process has trained with each kind of replay."""
    folder = tmp_path_factory.mktemp("runs")
    rows = [{"id": i, "prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(24)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(RECIPE.format(model=model_path, folder=folder, url=url))
    asked = {name: [f"preset={name}", *own] for name, own in RUNS.items()}
    with preloading():
        done = subprocess.run(
            [sys.executable, "-m", "tests.integration.presets_worker", folder / "recipe.yaml", folder, json.dumps(asked)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=500,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    return folder, done.stdout


@pytest.mark.parametrize("preset", RUNS)
def test_a_run_replays_the_routes_of_every_token_it_trains(runs, preset):
    folder, output = runs
    assert f"== {preset} ended with 0" in output, output[-6000:]
    rows = {row.step: row.metrics for row in read_metrics(folder / preset / "metrics.jsonl")}
    assert sorted(rows) == [1, 2, 3]
    for step, metrics in rows.items():
        if preset == "tppo" and step == 1:
            continue  # the critic warms up
        # The engine knows no route of a sequence's last token, which no log-prob depends on.
        share = metrics["policy/moe_replayed_share"]
        assert share == 1.0 if preset == "grpo" else 0.9 < share < 1.0
        assert metrics["mismatch/max_abs_log_ratio"] < 1e-3
        assert metrics["policy/grad_norm"] > 0 and metrics["policy/moe_balance_loss"] > 0
        assert 1 <= metrics["policy/moe_max_load"] <= 4 and 0 < metrics["policy/moe_load_entropy"] <= 1


def test_a_worker_on_another_node_changes_no_bit(windows, model_path, url, tmp_path):
    """Two ranks of which each has another node: the answers are read on the second, and routes are fetched from there."""
    rows = [{"id": i, "prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(24)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=model_path, folder=tmp_path, url=url))
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "sitecustomize.py").write_text(TWO_NODES)
    words = ["preset=tppo", *RUNS["tppo"], "parallel.num_ranks=2", "rollout.num_workers=1", "run.num_steps=2"]
    repository = Path(__file__).resolve().parents[2]
    for name, path in (("one", ""), ("two", f"{tmp_path / 'nodes'}:")):
        with preloading():  # only the first: a fork would read sitecustomize.py too late
            done = subprocess.run(
                [sys.executable, "-m", "megatron_rl.cli", "train", f"--config={recipe}", *words, f"run.output_dir={tmp_path / name}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=500,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{path}{repository}"},
            )
        assert done.returncode == 0, done.stdout[-6000:]
        assert ("rollout workers on other nodes: 1 each" in done.stdout) == (name == "two"), done.stdout[-6000:]
        assert "made on the driver's machine" not in done.stdout
    assert differences(tmp_path / "one", tmp_path / "two") == []
