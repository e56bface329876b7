"""Seconds that a publish of weights takes, by broadcast or point to point. Pure.

Each pipeline stage first gathers its full tensors, then sends them. A broadcast sends every tensor to every GPU of
every server, and the stages broadcast in sequence. Point to point, each GPU receives only its own part. The driver
sends one request per server and bucket while the previous bucket is in transit; these requests cost time only if
buckets are small or servers are many.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_rl.desk.costs.gpus import Gpu

BUCKET_BYTES = 2**30
"""Bucket size of a publish from GPUs."""


@dataclass(frozen=True)
class PublishCosts:
    """Seconds, most of them per byte. Fitted to two rows of Miles' profile (docs/advanced/p2p-weight-transfer.md, H100):
    Qwen3-30B-A3B with both methods, and Kimi-K2 with broadcast."""

    gather: float = 0.0329e-9
    """Seconds per byte of a stage: all-gather, conversion to Hugging Face tensors, loading."""
    broadcast: float = 0.00838e-9
    """Seconds per byte of the model."""
    broadcast_machine: float = 0.00123e-9
    """Seconds per byte of the model and node of servers: nodes follow one another in NCCL's ring."""
    request_s: float = 0.2e-3
    """Driver's seconds per request to one server (``tools/bench_publish.py`` on busy cores: 2.5 s for 12,192; not fitted)."""


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
    """Seconds of one publish.

    ``num_bytes``: size of the model in transit. ``num_stages``: pipeline stages of the trainer, which gather in
    parallel. ``bucket_bytes``: bytes per request to a server.
    """
    costs = costs or PublishCosts()
    gather = costs.gather * num_bytes / num_stages
    if way == "point_to_point":
        return gather + num_bytes / gpus_per_server / gpu.nic_bandwidth
    machines = -(-num_server_gpus // gpu.per_machine)
    wire = num_bytes * (costs.broadcast + costs.broadcast_machine * machines)
    requests = num_bytes / bucket_bytes * num_server_gpus / gpus_per_server
    return gather + max(wire, requests * costs.request_s)
