"""Run by ``te_ranks.py`` on two ranks: every job of a folder on each layout, through Transformer Engine's layers.

argv: a folder that holds ``jobs.pt`` and receives ``results.pt``, {layout: {job: what ``run_job`` gives}}, or the text of a refusal.
"""

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.config.schema import Dtype, Init, OptimizerConfig, ParallelConfig
from megatron_rl.data.batch import ROUTES, PackedBatch, cu_seqlens_of
from megatron_rl.errors import UserError
from megatron_rl.families.model_facts import has_vision
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.models.hf.weights import expected_names
from megatron_rl.parallel import topology
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from megatron_rl.training.engine import Engine
from tests.integration.engine_worker import set_overlap
from tests.te_stand_ins import CALLS
from tests.vision_batches import make_vision_batch

LAYOUTS: dict[str, ParallelConfig] = {
    "dp2": ParallelConfig(),
    "dp2_overlap": ParallelConfig(),
    "tp2_sp": ParallelConfig(tensor_parallel_size=2, sequence_parallel=True),
    "cp2": ParallelConfig(context_parallel_size=2),
    "ep2": ParallelConfig(expert_parallel_size=2),
    "tp2_ep2": ParallelConfig(
        tensor_parallel_size=2, sequence_parallel=True, expert_parallel_size=2, expert_tensor_parallel_size=1
    ),
}
LENGTHS = [9, 1, 40, 23, 17, 2]
LEARNING_RATE = 1e-4


def write_weights(folder: Path, seed: int) -> None:
    """Random weights for the config.json in ``folder``, of a size at which mistakes show."""
    config = load_hf_config(folder)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_names(config, "policy").items():
        values = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            tensors[name] = values * 1.5 / math.sqrt(math.prod(shape[1:]))
        else:
            tensors[name] = values * 0.1 + (0.0 if "bias" in name else 1.0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def make_pack(folder: Path) -> PackedBatch:
    """Sequences of mixed lengths, with images where the model sees; fields ``mask`` and ``weight``, of the loss."""
    config = load_hf_config(folder)
    if has_vision(config.to_dict()):
        batch = make_vision_batch(config.vision_config)
    else:
        tokens = torch.randint(3, 90, (sum(LENGTHS),), generator=torch.Generator().manual_seed(5))
        mask = torch.ones(len(tokens), dtype=torch.bool)
        batch = PackedBatch(tokens, cu_seqlens_of(torch.tensor(LENGTHS)), {"mask": mask})
    weight = torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(7))
    return PackedBatch(batch.tokens, batch.cu_seqlens, {**batch.fields, "weight": weight}, batch.images)


def run_job(job: Mapping[str, Any], parallel: ParallelConfig, ranks: topology.Topology) -> dict[str, Any] | str:
    """Log-probs [T] before and after a step, its gradient's norm and weights, and whether what was loaded comes out again.

    Also the bytes that the step's last pass kept, the kernels that the step called, and with ``job["moe"]`` the routes,
    which the step then follows. With ``job["saves"]`` the names of weights that a checkpoint did not bring back.

    ``job``: path, and what else the engine is given (recompute, moe, lora). The text of the refusal of a model that does
    not fit. The tensors are whole on rank 0 alone.
    """
    declare_torchvision_ops()
    try:
        engine = make_engine(job, parallel, ranks)
    except UserError as error:
        return str(error)
    batch = make_pack(Path(job["path"]))
    loaded = _exported(engine)
    if job.get("saves"):
        # A save may come before the first step, when the optimizer would have no state of its own.
        engine.save_state(Path(job["path"]).parent / "state")
    outputs = engine.logprobs([batch])
    CALLS.clear()
    routes = None
    if "moe" in job:  # with a replay of its routes
        engine.logprobs([batch], record_routes=True)
        (routes,) = engine.pop_routes()
        batch = PackedBatch(batch.tokens, batch.cu_seqlens, {**batch.fields, ROUTES: routes}, batch.images)
    # Each data-parallel rank has sequences of its own, in two micro-batches.
    mine = list(range(batch.num_sequences))[ranks.dp_rank :: ranks.dp_size]
    kept = Kept(engine)
    with torch.autograd.graph.saved_tensors_hooks(kept.note, lambda tensor: tensor):
        update = engine.update([batch.select(mine[:1]), batch.select(mine[1:])], kept.loss)
    called = sorted(CALLS)
    after = engine.logprobs([batch])
    stepped = _exported(engine)
    file = load_file(Path(job["path"]) / "model.safetensors")
    return {
        "logprobs": outputs[0] if outputs else None,
        "called": called,
        "routes": routes,
        "grad_norm": update.grad_norm,
        "kept_bytes": kept.num_bytes,
        "logprobs_after": after[0] if after else None,
        "stepped": stepped,
        "not_resumed": resumed(engine, job, batch, mine) if job.get("saves") else [],
        "lost": [name for name in loaded if not torch.equal(loaded[name], file[name])],
    }


def make_engine(job: Mapping[str, Any], parallel: ParallelConfig, ranks: topology.Topology, **others: Any) -> Engine:
    options = {name: value for name, value in job.items() if name in ("recompute", "moe", "lora")}
    return Engine(
        "policy",
        job["path"],
        parallel=parallel,
        topology=ranks,
        # A small eps would blow gradients that are zero but for rounding up to a whole step.
        optimizer=OptimizerConfig(lr=LEARNING_RATE, warmup_steps=0, eps=1e-3),
        dtype=Dtype.float32,
        **options,
        **others,
    )


def resumed(engine: Engine, job: Mapping[str, Any], batch: PackedBatch, mine: list[int]) -> list[str]:
    """Weights that differ between this engine and one that took its state over, after one more step of each."""
    folder = Path(job["path"]).parent / "state"
    engine.save_state(folder)
    other = make_engine(job, engine.parallel, engine.topology, init=Init.random, seed=9)
    other.load_state(folder)
    for one in (engine, other):
        one.update([batch.select(mine)], weighted_loss)
    pairs = zip(_exported(engine).items(), _exported(other).items(), strict=True)
    return [name for (name, kept), (_, found) in pairs if not torch.equal(kept, found)]


class Kept:
    """Bytes that a pass keeps for its backward pass: at the end of the last forward pass, without the weights."""

    def __init__(self, engine: Engine) -> None:
        self._weights = {weight.untyped_storage().data_ptr() for chunk in engine.chunks for weight in chunk.parameters()}
        self._saved: list[torch.UntypedStorage] = []
        self.num_bytes = 0

    def note(self, tensor: Tensor) -> Tensor:
        self._saved.append(tensor.untyped_storage())
        return tensor

    def loss(self, outputs: Mapping[str, Tensor], batch: PackedBatch) -> tuple[Tensor, dict[str, Any]]:
        # What was discarded to be computed again has no bytes now.
        sizes = {storage.data_ptr(): storage.nbytes() for storage in self._saved if storage.nbytes()}
        self.num_bytes = sum(size for pointer, size in sizes.items() if pointer not in self._weights)
        self._saved.clear()
        return weighted_loss(outputs, batch)


def weighted_loss(outputs: Mapping[str, Tensor], batch: PackedBatch) -> tuple[Tensor, dict[str, Any]]:
    weight = batch.fields["weight"] * batch.fields["mask"]
    return (weight * outputs["logprobs"]).sum() + 0.1 * (batch.fields["mask"] * outputs["entropy"]).sum(), {}


def _exported(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export_weights() if tensor is not None}


def main() -> None:
    folder = Path(sys.argv[1])
    jobs = torch.load(folder / "jobs.pt", weights_only=False)
    results: dict[str, dict[str, Any]] = {}
    for layout, parallel in LAYOUTS.items():
        ranks = topology.initialize(ParallelConfig(**{**vars(parallel), "collective_timeout_s": 120.0}), seed=1)
        set_overlap(layout == "dp2_overlap")
        results[layout] = {}
        for name in (name for name, job in jobs.items() if layout in job["layouts"]):
            print(f"{time.monotonic():.1f}", layout, name, flush=True)  # for the log of a failure
            results[layout][name] = run_job(jobs[name], parallel, ranks)
        if ranks.rank == 0:
            torch.save(results, folder / "results.pt")
        topology.destroy()


if __name__ == "__main__":
    main()
