"""Two trainer ranks under torchrun that publish sharded weights; started by test_weight_sync.py.

Arguments: model folder, server URL, weights version. Each rank holds one half of every tensor (the rows are dealt by
rank) and the stream gathers them over the default group, as a Megatron export does.
"""

import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_rl.weights.buckets import take_part
from megatron_rl.weights.publish import WeightPublisher, WeightSyncError
from megatron_rl.weights.verify import compare_checksums

CHANGE = 0.01
NOBODY = "http://127.0.0.1:9"


def gathered(shards: dict[str, tuple[torch.Tensor, torch.Size]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, (shard, shape) in shards.items():
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, shard)
        yield name, torch.cat(parts).view(shape)


def main(model_path: str, url: str, version: int) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    full = load_file(Path(model_path) / "model.safetensors")
    shards = {
        name: ((tensor + CHANGE).flatten().chunk(2)[rank].clone(), tensor.shape) for name, tensor in full.items()
    }
    if rank == 0:
        publisher = WeightPublisher(40_000, 60.0, backend="gloo")
        publisher.publish(gathered(shards), [(url, 1, 1)], version)
        report = compare_checksums([(url, 1, 1)], gathered(shards))
        report.raise_if_different()
        print(f"compared {report.num_compared} with the {report.reference}", flush=True)
        try:
            publisher.publish(gathered(shards), [(NOBODY, 1, 1)], version + 1)
        except WeightSyncError as error:
            print(f"as expected: {error}", flush=True)
        publisher.close()
    else:
        for _ in range(3):
            take_part(gathered(shards))
    # The trainer's own group works on after successes and failures of the extra one.
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    dist.destroy_process_group()
    print(f"rank {rank} done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
