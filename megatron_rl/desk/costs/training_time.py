"""Seconds of training and of a publish, in closed form. Pure.

Training:

    seconds = (products + experts) / ranks * (1 + bubble)
    products = passes * forward FLOPs / (peak * fraction of the peak)
    experts  = cost of sending tokens to experts and back: traffic of the GPU's memory and of its network card

One pass costs as much as a forward pass: log-probs take 1, an update 3, with full recomputation 4. Communication
of tensor and data parallelism is assumed to be hidden, which holds within a node and with micro-batches of a few
thousand tokens.

Publish: each pipeline stage first gathers its full tensors, then sends them. A broadcast sends every tensor to every GPU
of every server, and the stages broadcast in sequence. Point to point, each GPU receives only its own part. The driver
sends one request per server and bucket while the previous bucket is in transit; these requests cost time only if
buckets are small or servers are many.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_rl.config.layout import expert_tensor_size
from megatron_rl.config.schema import ParallelConfig
from megatron_rl.desk.costs.gpus import Gpu
from megatron_rl.families.family import ModelConfig
from megatron_rl.families.flops import flops_cost
from megatron_rl.families.model_facts import dims, has_experts, router_groups, text_config


@dataclass(frozen=True)
class Efficiency:
    """Fractions of a GPU's peak that a trainer reaches. Defaults: FP8 pretraining with fixed lengths and evenly loaded experts.

    Fitted to three rows of Megatron-Bridge's performance summary, one constant each: Llama 3 8B (25.11), Qwen3
    30B-A3B (26.04.01) and DeepSeek-V3 (25.09), on H100.
    """

    products: float = 0.752
    """Fraction of the dense bfloat16 peak; FP8 reaches more of that peak than bfloat16 can."""
    routed_bytes: float = 315.5
    """Memory traffic in bytes per value of a token routed to an expert, over the three passes of an update: routing, copies,
    and the loss of grouped against plain matrix products, expressed as bytes."""
    exposed_network: float = 0.416
    """Fraction of the traffic between nodes that no computation hides."""


REINFORCEMENT = Efficiency(products=0.343, routed_bytes=691.0, exposed_network=0.91)
"""Efficiency of training a mixture of experts in bfloat16 with real lengths and routing: 2.2 times slower than pretraining.
Fitted to NeMo-RL's step of Qwen3 30B-A3B (v0.6, on policy, 32 H100)."""


def training_seconds(
    config: ModelConfig,
    parallel: ParallelConfig,
    gpu: Gpu,
    lengths: Sequence[int],
    *,
    num_ranks: int,
    passes: float = 3.0,
    num_packs: int = 2**31,
    efficiency: Efficiency | None = None,
) -> float:
    """Seconds for ``passes`` over sequences of ``lengths`` [tokens, with the prompt], with balanced micro-batches.

    ``parallel`` must fit ``num_ranks``. ``num_packs``: micro-batches per replica between two updates, which determine the bubble.
    """
    efficiency = efficiency or Efficiency()
    flops = sum(map(flops_cost(config), lengths))
    products = passes * flops / (gpu.flops["bfloat16"] * efficiency.products)
    experts = passes / 3 * sum(lengths) * _expert_seconds(config, parallel, gpu, efficiency)
    return (products + experts) / num_ranks * _fullest_stage(parallel) * (1 + bubble(parallel, num_packs))


def _fullest_stage(parallel: ParallelConfig) -> float:
    """Layers of the largest pipeline stage over the mean: the other stages wait for it."""
    layers, stages = parallel.pipeline_layers, parallel.pipeline_parallel_size
    return max(sum(layers[stage::stages]) for stage in range(stages)) * stages / sum(layers) if layers else 1.0


def bubble(parallel: ParallelConfig, num_packs: int) -> float:
    """Idle time of a pipeline over its busy time: (stages - 1) / (chunks * micro-batches), arXiv 2104.04473 section 2.2."""
    return (parallel.pipeline_parallel_size - 1) / (parallel.virtual_pipeline_size * num_packs)


def _expert_seconds(config: ModelConfig, parallel: ParallelConfig, gpu: Gpu, efficiency: Efficiency) -> float:
    """Seconds per token that experts add to the matrix products, over all layers and the three passes of an update."""
    layers, hidden = sum(has_experts(config)), dims(config)["hidden"]
    if not layers:
        return 0.0
    memory = efficiency.routed_bytes * text_config(config).num_experts_per_tok * hidden / gpu.hbm_bandwidth
    # Activations travel in bfloat16, there and back, forward and backward, once to each node with one of the token's experts.
    network = 4 * 2 * hidden * _other_machines(config, parallel, gpu) / gpu.nic_bandwidth
    return layers * (memory + efficiency.exposed_network * network)


def _other_machines(config: ModelConfig, parallel: ParallelConfig, gpu: Gpu) -> float:
    """Mean number of other nodes that have experts of a token, if routing is uniform."""
    machines = -(-parallel.expert_parallel_size * expert_tensor_size(parallel) // gpu.per_machine)
    groups, chosen_groups = router_groups(config)
    others = (machines - 1) * (1 - (1 - 1 / machines) ** text_config(config).num_experts_per_tok)
    return min(others, chosen_groups) if groups > 1 else others


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
