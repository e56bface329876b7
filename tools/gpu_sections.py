"""The measurements of gpu_validate.py, each in a separate process: ``python tools/gpu_sections.py SECTION JOB.json``.

A job is a dictionary; ``out`` names the file that rank 0 writes its rows to, one line of JSON each, as soon as each is
measured; ``scratch`` is a folder for models. Models have random weights that depend on seed and name alone, so that the same
job gives the same model on every machine.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_rl.config.layout import parse_layout
from megatron_rl.config.schema import AlgorithmConfig, Dtype, Init, OptimizerConfig, ParallelConfig, Recompute
from megatron_rl.data.batch import PackedBatch
from megatron_rl.desk.costs.parameter_counts import num_parameters
from megatron_rl.desk.doctor.layout_ranks import OPTIMIZER, make_batch
from megatron_rl.families.flops import flops_cost
from megatron_rl.models.layers.torch_layers import has_transformer_engine
from megatron_rl.parallel import topology as topologies
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from megatron_rl.training import losses
from megatron_rl.training.batching import plan_microbatches
from megatron_rl.training.engine import Engine

SMALL: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.1,
    tie_word_embeddings=False,
)
"""Sizes that attention kernels for GPUs take."""
BIASED_EXPERTS: dict[str, Any] = dict(
    moe_intermediate_size=64,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    num_nextn_predict_layers=0,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(model_type="llama", head_dim=32),
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=True),
    "qwen3": dict(model_type="qwen3", head_dim=64),
    "qwen3_moe": dict(
        model_type="qwen3_moe",
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    ),
    "mixtral": dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "deepseek_v3": dict(
        model_type="deepseek_v3",
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        **BIASED_EXPERTS,
    ),
    "glm4_moe": dict(model_type="glm4_moe", head_dim=32, attention_bias=True, use_qk_norm=True, **BIASED_EXPERTS),
}
_QWEN = dict(vocab_size=151936, num_key_value_heads=2, max_position_embeddings=32768, initializer_range=0.02)
MODELS: dict[str, dict[str, Any]] = {
    "tiny-dense": {**SMALL, "model_type": "qwen2"},
    "tiny-moe": {**SMALL, **FAMILIES["qwen3_moe"]},
    "dense-1.5b": dict(
        **_QWEN,
        model_type="qwen2",
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        tie_word_embeddings=True,
    ),
    "dense-3b": dict(
        **_QWEN,
        model_type="qwen2",
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "dense-7b": dict(
        **{**_QWEN, "num_key_value_heads": 4, "vocab_size": 152064},
        model_type="qwen2",
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        tie_word_embeddings=False,
    ),
    "moe-3b": dict(
        **_QWEN,
        model_type="qwen3_moe",
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=16,
        num_attention_heads=16,
        head_dim=128,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
}
STATE_BYTES, UPDATE_BYTES = 18.0, 8.0
"""Bytes of one parameter on one rank: bfloat16 weight; float32 gradient, main weight and two moments. During an update,
PyTorch's AdamW adds two float32 temporaries."""
PARITY_LENGTHS = (9, 17, 33, 6, 21, 12)
LIBRARIES = (
    "torch",
    "megatron-core",
    "sglang",
    "transformers",
    "transformer_engine",
    "apex",
    "flash_attn",
    "deep_ep",
    "flashinfer-python",
    "sgl-kernel",
)


def write_model(folder: Path, fields: dict[str, Any]) -> Path:
    """config.json alone: weights are drawn when the model is built."""
    declare_torchvision_ops()
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    tokens = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    # SGLang looks models up by this name.
    names = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[fields["model_type"]]]
    AutoConfig.for_model(**{**fields, **tokens, "architectures": names}).save_pretrained(folder)
    return folder


def environment(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure the environment: devices, libraries, and the parts of them that a run would use."""
    rows: list[tuple[str, Any]] = [("torch.cuda", torch.version.cuda or "none"), ("CPU cores", os.cpu_count())]
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        capability = f"compute capability {found.major}.{found.minor}"
        rows.append((f"GPU {index}", f"{found.name}, {found.total_memory / 2**30:.0f} GiB, {capability}"))
    if not torch.cuda.is_available():
        rows.append(("GPU", "none"))
    for name in LIBRARIES:
        try:
            rows.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            # Apex and others built from source may have no metadata of this name.
            rows.append((name, "present" if importlib.util.find_spec(name.replace("-", "_")) else "not installed"))
    rows.append(("layers", "Transformer Engine" if has_transformer_engine() else "this project's, in plain PyTorch"))
    fused = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    rows.append(("fused gradient accumulation (Apex)", "yes" if fused else "no"))
    yield from ({"what": what, "found": str(found)} for what, found in rows)


def parity(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Compute log-probs and one update of each family's tiny model; tensors go to ``<out>.pt``, to be compared."""
    tensors = {}
    place = topologies.initialize(ParallelConfig(), seed=1)
    for family in job["families"]:
        try:
            tensors[family] = _answer_and_update(Path(job["scratch"]) / family, FAMILIES[family], job["dtype"], place)
            yield {"family": family, "error": ""}
        except Exception as error:  # another family may work: the report names this one's reason
            yield {"family": family, "error": _first_line(error)}
        torch.save(tensors, f"{job['out']}.pt")
    topologies.destroy()


def _answer_and_update(folder: Path, fields: dict[str, Any], dtype: str, place: topologies.Topology) -> dict[str, Any]:
    engine = Engine(
        "policy",
        write_model(folder, {**SMALL, **fields}),
        parallel=ParallelConfig(),
        topology=place,
        optimizer=OPTIMIZER,
        init=Init.random,
        dtype=Dtype(dtype),
    )
    batch = make_batch(list(PARITY_LENGTHS), SMALL["vocab_size"], "policy", 1, 0)
    logprobs = torch.cat(engine.logprobs([batch])).cpu()
    before = {name: tensor.detach().float().cpu().clone() for name, tensor in engine.export_weights()}
    result = engine.update([batch], supervised(batch))
    total, count = result.metrics["lm_loss"]
    # The step is linear in the gradient, so the change is the gradient.
    change = {name: tensor.detach().float().cpu() - before[name] for name, tensor in engine.export_weights()}
    return {"logprobs": logprobs, "loss": total / count, "grad_norm": result.grad_norm, "change": change}


def supervised(batch: PackedBatch, num_replicas: int = 1) -> losses.LossFunction:
    denominators = {"mask": num_replicas * float(batch.fields["mask"].sum())}
    return losses.build("sft", AlgorithmConfig(), denominators)


def training(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Optimizer steps of one random model in one layout: seconds, tokens, operations and memory per step."""
    parallel, _ = parse_layout(job["layout"], ParallelConfig())
    place = topologies.initialize(parallel, seed=1)
    on_gpu = torch.cuda.is_available()
    folder = write_model(Path(job["scratch"]) / f"{job['model']}-{place.rank}", MODELS[job["model"]])
    if on_gpu and place.world_size == 1 and (obstacle := _too_large(folder)):
        yield {"too_large": obstacle}
        return
    engine = Engine(
        "policy",
        folder,
        parallel=parallel,
        topology=place,
        optimizer=OptimizerConfig(lr=1e-6),
        init=Init.random,
        dtype=Dtype(job["dtype"]),
        recompute=Recompute(job["recompute"]),
    )
    lengths = [job["sequence_tokens"]] * (job["sequences_per_replica"] * place.dp_size)
    batch = make_batch(lengths, engine.hf_config.vocab_size, "policy", 1, None)
    plan = plan_microbatches(lengths, place.dp_size, job["max_tokens_per_microbatch"])[place.dp_rank]
    microbatches, objective = [batch.select(indices) for indices in plan], supervised(batch)
    seconds, norms = [], []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(job["num_warmup"] + job["num_steps"]):
        _wait_for_device()
        started = time.perf_counter()
        norms.append(engine.update(microbatches, objective).grad_norm)
        _wait_for_device()
        seconds.append(time.perf_counter() - started)
    measured = sorted(seconds[job["num_warmup"] :])
    cost = flops_cost(engine.hf_config)
    if place.rank == 0:
        yield {
            "num_ranks": place.world_size,
            "num_tokens": sum(lengths),
            "s_per_step": measured[len(measured) // 2],
            "flops_per_step": 3.0 * sum(cost(length) for length in lengths),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "grad_norm": norms[-1],
        }
    topologies.destroy()


def _too_large(folder: Path) -> str:
    """The reason why one GPU cannot train the model, or "": the state of a parameter and what the update adds to it."""
    from transformers import AutoConfig

    needed = num_parameters(AutoConfig.from_pretrained(folder)) * (STATE_BYTES + UPDATE_BYTES)
    found = torch.cuda.get_device_properties(0).total_memory
    gib = 2.0**30
    return f"its state takes {needed / gib:.0f} GiB, one GPU has {found / gib:.0f}" if needed > 0.95 * found else ""


def weight_sync(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Publishes of a random model to a server: seconds and bytes; afterwards the weights are compared."""
    from megatron_rl.config.derived import WeightMethod
    from megatron_rl.weights.publish import WeightPublisher

    num_gpus, stock = torch.cuda.device_count(), importlib.util.find_spec("sglang") is not None
    folder = write_model(Path(job["scratch"]) / "model", MODELS[job["model"]])
    place = topologies.initialize(ParallelConfig(), seed=1)
    engine = Engine(
        "policy",
        folder,
        parallel=ParallelConfig(),
        topology=place,
        optimizer=None,
        init=Init.random,
        dtype=Dtype(job["dtype"]),
    )
    version = 0
    with _sglang_server(folder, job) if stock else _ipc_server(job) as server:
        facts = {"server": "SGLang" if stock else "tools/ipc_server.py"}
        facts["cuda_graphs"] = _cuda_graphs(server.url) if stock else "no engine"
        for method, name in (
            sync_methods(num_gpus).items() if stock else [("colocated", "CUDA IPC" if num_gpus else "shared memory")]
        ):
            publisher = WeightPublisher(
                job["bucket_bytes"], 300.0, method=WeightMethod(method), folder=Path(job["scratch"]) / "weights"
            )
            for index in range(job["num_publishes"]):
                version += 1
                address = [(server.url, 1, server.incarnation)]
                done = publisher.publish(engine.export_weights(), address, version, expected=engine.expected_weights())
                row = {"way": name, "seconds": done.seconds, "num_bytes": done.num_bytes, **facts}
                if index == job["num_publishes"] - 1:
                    row["num_differing"] = _num_differing(address[0], engine, stock=stock)
                yield row
            publisher.close()
    topologies.destroy()


def _num_differing(address: tuple[str, int, int], engine: Engine, *, stock: bool) -> int:
    """Number of the server's tensors whose checksums differ from the engine's."""
    if stock:
        from megatron_rl.weights.verify import compare_checksums

        return sum(len(names) for names in compare_checksums([address], engine.export_weights()).differing.values())
    from ipc_server import digest_of

    with urllib.request.urlopen(f"{address[0]}/digests", timeout=300) as reply:
        found = json.loads(reply.read())
    own = {name: digest_of(tensor) for name, tensor in engine.export_weights()}
    return sum(found.get(name) != own.get(name) for name in found.keys() | own.keys())


@contextmanager
def _sglang_server(folder: Path, job: dict[str, Any]) -> Iterator[Any]:
    from megatron_rl.rollout.sglang.process.options import ServerOptions
    from megatron_rl.rollout.sglang.process.server import SglangServer
    from megatron_rl.system.gpu.gpu_environment import detect_device

    num_gpus = torch.cuda.device_count()
    options = ServerOptions(
        model_path=str(folder),
        dtype=job["dtype"],
        load_weights=False,
        device=detect_device(),
        env={"CUDA_VISIBLE_DEVICES": str(num_gpus - 1)} if num_gpus > 1 else {},
        server_args={"max-total-tokens": 20000, **({"mem-fraction-static": 0.3} if num_gpus == 1 else {})},
    )
    with SglangServer(options, Path(job["scratch"]) / "server.log", start_timeout_s=job["timeout_s"]) as server:
        yield server


@contextmanager
def _ipc_server(job: dict[str, Any]) -> Iterator[Any]:
    """A process that reads buckets on this device as an SGLang worker does, for machines without SGLang."""
    command = [sys.executable, str(Path(__file__).with_name("ipc_server.py"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield SimpleNamespace(url=process.stdout.readline().strip(), incarnation=0)
        finally:
            process.kill()


def sync_methods(num_gpus: int) -> dict[str, str]:
    """Ways to a server, with what they go through. NCCL takes one process per GPU; on one GPU the server shares it."""
    if num_gpus > 1:
        return {"broadcast": "NCCL", "disk": "files"}
    if num_gpus == 1:
        return {"colocated": "CUDA IPC", "disk": "files"}
    return {"broadcast": "gloo", "colocated": "shared memory", "disk": "files"}


def _cuda_graphs(url: str) -> str:
    """State of CUDA graphs as the server reports it: "on", "off" or "no GPU"."""
    from megatron_rl.system.http.json_http import get_once

    info = get_once(f"{url}/server_info", timeout_s=60).json()
    on_gpu = torch.cuda.is_available()
    return "no GPU" if not on_gpu else "off" if info.get("disable_cuda_graph") else "on"


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


SECTIONS = {"environment": environment, "parity": parity, "training": training, "weight_sync": weight_sync}


def main() -> None:
    section, job_file = sys.argv[1:]
    job = json.loads(Path(job_file).read_text())
    for row in SECTIONS[section](job):
        with Path(job["out"]).open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
