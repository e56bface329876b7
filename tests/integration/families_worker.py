"""Run by torchrun from ``test_families.py`` on two ranks: tensor and pipeline parallelism, one after the other.

argv: a folder that holds ``jobs.pt`` and receives ``results.pt``; ``checkpoints/`` in it receives what tensor-parallel
ranks save in Megatron's distributed format.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.models import policy
from megatron_rl.models.hf.config import load_hf_config
from megatron_rl.models.hf.weights import load_weights
from megatron_rl.parallel import topology
from tests.integration.models_worker import run_role

LAYOUTS: dict[str, ParallelConfig] = {
    "tp2_sp": ParallelConfig(tensor_parallel_size=2, sequence_parallel=True),
    "pp2": ParallelConfig(pipeline_parallel_size=2),
}


def save_distributed(job: dict[str, Any], parallel: ParallelConfig, folder: Path, rank: int) -> None:
    from megatron.core import dist_checkpointing

    config = load_hf_config(job["path"])
    (chunk,) = policy.build_policy(config, parallel, dtype=torch.float32, seed=None)
    load_weights([chunk], config, job["path"])
    if rank == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    metadata = {"singleton_local_shards": False}
    dist_checkpointing.save(chunk.sharded_state_dict(metadata=metadata), str(folder), content_metadata=metadata)


def main() -> None:
    folder = Path(sys.argv[1])
    jobs = torch.load(folder / "jobs.pt")
    results: dict[str, Any] = {}
    for name, parallel in LAYOUTS.items():
        ranks = topology.initialize(ParallelConfig(**{**vars(parallel), "collective_timeout_s": 120.0}), seed=1)
        for model, job in jobs.items():
            job = {**job, "save_to": folder / "saved" / f"{model}_{name}"}
            results[name, model] = run_role("policy", job, parallel, ranks)
            if name == "tp2_sp":
                save_distributed(job, parallel, folder / "checkpoints" / model, ranks.rank)
        if ranks.rank == 0:
            torch.save(results, folder / "results.pt")
        topology.destroy()


if __name__ == "__main__":
    main()
