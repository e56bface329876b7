"""Run on four ranks from ``test_saving.py``: models saved together in several layouts, with a disk that fills up, with a kill.

argv: a folder with ``models/``, which receives ``saved/`` and ``results.pt``; and optionally ``kill``: then one rank is killed
while ``target`` in it is saved for the second time.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.models import policy
from megatron_rl.models.hf import folder as hf_folder
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.models.hf.weights import load_weights, save_hf
from megatron_rl.parallel import collectives, topology

SHARD_BYTES = 20_000
LAYOUTS: dict[str, ParallelConfig] = {
    "dp4": ParallelConfig(),
    "tp2_sp_pp2": ParallelConfig(tensor_parallel_size=2, sequence_parallel=True, pipeline_parallel_size=2),
    "tp2_sp_ep4_etp1": ParallelConfig(
        tensor_parallel_size=2, sequence_parallel=True, expert_parallel_size=4, expert_tensor_parallel_size=1
    ),
    "pp2_ep2": ParallelConfig(pipeline_parallel_size=2, expert_parallel_size=2),
    "tp2_sp_ep2_etp2": ParallelConfig(tensor_parallel_size=2, sequence_parallel=True, expert_parallel_size=2),
}
LAYOUTS_OF = {"qwen2": ["dp4", "tp2_sp_pp2"], "qwen3_vl_moe": ["dp4", "tp2_sp_ep2_etp2"]}
"""Layouts per family; other families: all."""
FULL_RANK = 3


class CountingWriter(hf_folder.RankWriter):
    """Counts the bytes that each rank writes, and fails on request."""

    num_written = 0
    at_tensor: ClassVar[dict[int, Any]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        self.num_added = getattr(self, "num_added", 0) + 1
        if act := self.at_tensor.get(self.num_added):
            act()
        super().add(name, tensor)
        CountingWriter.num_written += tensor.nbytes


def save(chunks: list[Any], config: Any, source: Path, target: Path) -> str:
    try:
        save_hf(chunks, config, source, target, max_shard_bytes=SHARD_BYTES)
    except OSError as error:
        return str(error)
    return ""


def full_disk() -> None:
    raise OSError(28, "No space left on device")


def main(folder: Path, *, kill: bool) -> None:
    hf_folder.RankWriter = CountingWriter  # type: ignore[misc]
    results: dict[Any, Any] = {}
    for name, parallel in LAYOUTS.items():
        ranks = topology.initialize(ParallelConfig(**{**vars(parallel), "collective_timeout_s": 60.0}), seed=1)
        for source in sorted((folder / "models").iterdir()):
            config = load_hf_config(source)
            if name not in LAYOUTS_OF.get(config.model_type, LAYOUTS):
                continue
            chunks = policy.build_policy(config, parallel, dtype=torch.float32, seed=None)
            load_weights(chunks, config, source)
            CountingWriter.num_written = 0
            target = folder / ("target" if kill else f"saved/{source.name}-{name}")
            problem = save(chunks, config, source, target)
            results[source.name, name] = (problem, collectives.gather_objects(CountingWriter.num_written))
            if name != "dp4":
                continue
            if kill:
                if ranks.rank == 2:
                    CountingWriter.at_tensor = {3: lambda: os.kill(os.getpid(), signal.SIGKILL)}
                save(chunks, config, source, target)
            if ranks.rank == FULL_RANK:
                CountingWriter.at_tensor = {2: full_disk}
            results[source.name, "full"] = collectives.gather_objects(save(chunks, config, source, target))
            CountingWriter.at_tensor = {}
        topology.destroy()
    if ranks.rank == 0:
        torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), kill="kill" in sys.argv[2:])
