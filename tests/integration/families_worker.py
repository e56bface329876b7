"""Run by torchrun from ``test_families.py`` on two ranks: tensor and pipeline parallelism, one after the other.

argv: a folder that holds ``jobs.pt`` and receives ``results.pt``; ``checkpoints/`` in it receives what tensor-parallel
ranks save in Megatron's distributed format.
"""

import queue
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config.schema import Init, OptimizerConfig, ParallelConfig
from megatron_rl.errors import ModelError
from megatron_rl.models import policy
from megatron_rl.models.hf.megatron_config import check_layout
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.models.hf.weights import load_weights
from megatron_rl.parallel import topology
from megatron_rl.training.engine import Engine
from tests.integration.models_worker import run_role

LAYOUTS: dict[str, ParallelConfig] = {
    "tp2_sp": ParallelConfig(tensor_parallel_size=2, sequence_parallel=True),
    "pp2": ParallelConfig(pipeline_parallel_size=2),
}

COUNTED_LAYOUTS: dict[str, ParallelConfig] = {
    "ep2": ParallelConfig(expert_parallel_size=2),
    "tp2_sp_ep2": ParallelConfig(
        tensor_parallel_size=2, sequence_parallel=True, expert_parallel_size=2, expert_tensor_parallel_size=1
    ),
}


def save_distributed(job: dict[str, Any], parallel: ParallelConfig, folder: Path, rank: int) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Else a helper process of Megatron holds the results, and outlives this one.
    filesystem_async._results_queue = queue.Queue()
    config = load_hf_config(job["path"])
    (chunk,) = policy.build_policy(config, parallel, dtype=torch.float32, seed=None)
    load_weights([chunk], config, job["path"])
    if rank == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    metadata = {"singleton_local_shards": False}
    dist_checkpointing.save(chunk.sharded_state_dict(metadata=metadata), str(folder), content_metadata=metadata)


def count_parameters(path: str, parallel: ParallelConfig, ranks: topology.Topology) -> int | None:
    """Parameters of all ranks together by Megatron's own marks, each counted once; None where the layout does not fit."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    config = load_hf_config(path)
    try:
        check_layout(config, parallel)
    except ModelError:
        return None
    engine = Engine(
        "policy", path, parallel=parallel, topology=ranks, optimizer=OptimizerConfig(), init=Init.random
    )
    replicas = {True: ranks.dp_rank, False: parallel_state.get_expert_data_parallel_rank()}
    count = sum(
        parameter.numel()
        for chunk in engine.chunks
        for parameter in chunk.parameters()
        # Experts are the parameters that are not reduced over all data-parallel ranks.
        if replicas[getattr(parameter, "allreduce", True)] == 0
        and param_is_not_shared(parameter)
        and param_is_not_tensor_parallel_duplicate(parameter)
    )
    total = torch.tensor(count)
    torch.distributed.all_reduce(total)
    padding = -config.vocab_size % parallel.tensor_parallel_size * config.hidden_size
    return int(total) - padding * (1 if config.tie_word_embeddings else 2)


def main() -> None:
    folder = Path(sys.argv[1])
    jobs, models = torch.load(folder / "jobs.pt"), torch.load(folder / "models.pt")
    results: dict[str, Any] = {}
    for name, parallel in (LAYOUTS | COUNTED_LAYOUTS).items():
        ranks = topology.initialize(ParallelConfig(**{**vars(parallel), "collective_timeout_s": 120.0}), seed=1)
        results["counts", name] = {model: count_parameters(path, parallel, ranks) for model, path in models.items()}
        for model, job in jobs.items():
            if name not in job["layouts"]:
                continue
            job = {**job, "save_to": folder / "saved" / f"{model}_{name}"}
            results[name, model] = run_role("policy", job, parallel, ranks)
            if parallel.tensor_parallel_size == 2:
                save_distributed(job, parallel, folder / "checkpoints" / model, ranks.rank)
        if ranks.rank == 0:
            torch.save(results, folder / "results.pt")
        topology.destroy()


if __name__ == "__main__":
    main()
