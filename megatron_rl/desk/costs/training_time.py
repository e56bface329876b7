"""Seconds that trainer ranks compute. Pure.

    seconds = (products + experts) / ranks * (1 + bubble)
    products = passes * forward FLOPs / (peak * fraction of the peak)
    experts  = cost of sending tokens to experts and back: traffic of the GPU's memory and of its network card

One pass costs as much as a forward pass: log-probs take 1, an update 3, with full recomputation 4. Communication
of tensor and data parallelism is assumed to be hidden, which holds within a node and with micro-batches of a few
thousand tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class TrainingBatchWork:
    """Work that a trainer does on one batch."""

    lengths: Sequence[int]
    """Tokens of each sequence, including its prompt."""
    passes: float = 3.0
    num_packs: int = 2**31
    """Micro-batches per replica between two updates; determines the pipeline bubble."""


def training_seconds(
    config: ModelConfig,
    parallel: ParallelConfig,
    gpu: Gpu,
    work: TrainingBatchWork,
    *,
    num_ranks: int,
    efficiency: Efficiency | None = None,
) -> float:
    """Seconds for ``work`` on ``num_ranks`` ranks with balanced micro-batches. ``parallel`` must fit ``num_ranks``."""
    efficiency = efficiency or Efficiency()
    forward, tokens = flops_cost(config), sum(work.lengths)
    flops = sum(map(forward, work.lengths))
    products = work.passes * flops / (gpu.flops["bfloat16"] * efficiency.products)
    experts = work.passes / 3 * tokens * _expert_seconds(config, parallel, gpu, efficiency)
    return (products + experts) / num_ranks * _fullest_stage(parallel) * (1 + bubble(parallel, work.num_packs))


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
