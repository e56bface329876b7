"""Seconds that a publish of weights takes, by the way they travel. Pure.

Each pipeline stage first gathers its whole tensors; then they are sent. A broadcast brings every tensor to every GPU of
every server, and the stages take turns at the servers. Point to point, each GPU gets its own part alone. The driver asks every
server for every bucket while the bucket before travels: that shows only where buckets are small or servers many.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_rl.desk.costs.gpus import Gpu

BUCKET_BYTES = 2**30
"""Of a publish from GPUs."""


@dataclass(frozen=True)
class PublishCosts:
    """Seconds, most of them per byte. Fitted to two rows of Miles' profile (docs/advanced/p2p-weight-transfer.md, H100):
    Qwen3-30B-A3B by both ways, and Kimi-K2 by broadcast."""

    gather: float = 0.0329e-9
    """Of a stage's bytes: all-gather, conversion to Hugging Face tensors, loading."""
    broadcast: float = 0.00838e-9
    """Of the model's bytes."""
    broadcast_machine: float = 0.00123e-9
    """Of the model's bytes, for each machine of servers: they follow one another in NCCL's ring."""
    request_s: float = 0.2e-3
    """Of the driver, for one request to one server (``tools/bench_publish.py`` on busy cores: 2.5 s for 12,192; not fitted)."""


def publish_seconds(
    num_bytes: float,
    gpu: Gpu,
    *,
    way: Literal["broadcast", "point_to_point"],
    num_stages: int,
    num_server_gpus: int,
    gpus_per_server: int,
    bucket_bytes: int = BUCKET_BYTES,
    costs: PublishCosts | None = None,
) -> float:
    """``num_bytes``: of the model as it travels; ``num_stages``: of the trainer's pipeline, which gather side by side.

    ``bucket_bytes``: one request to each server carries so many.
    """
    costs = costs or PublishCosts()
    gather = costs.gather * num_bytes / num_stages
    if way == "point_to_point":
        return gather + num_bytes / gpus_per_server / gpu.nic_bandwidth
    machines = -(-num_server_gpus // gpu.per_machine)
    wire = num_bytes * (costs.broadcast + costs.broadcast_machine * machines)
    requests = num_bytes / bucket_bytes * num_server_gpus / gpus_per_server
    return gather + max(wire, requests * costs.request_s)
