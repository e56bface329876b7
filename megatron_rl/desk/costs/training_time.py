"""Seconds that trainer ranks compute. Pure.

    seconds = (products + experts) / ranks * (1 + bubble)
    products = passes * forward FLOPs / (peak * share of it)
    experts  = what sending tokens to experts and back costs: traffic of the GPU's memory, and of its network card

A pass is a forward pass' worth: log-probs take 1, an update 3, with full recomputation 4. Communication of tensor and data
parallelism is taken as hidden, which holds inside a machine and with packs of some thousand tokens.
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
    """How much of a GPU a trainer gets. Defaults: pretraining in FP8 with fixed lengths and evenly loaded experts.

    Fitted to three rows of Megatron-Bridge's performance summary, one constant each: Llama 3 8B (25.11), Qwen3 30B-A3B
    (26.04.01) and DeepSeek-V3 (25.09), on H100.
    """

    products: float = 0.752
    """Of the dense bfloat16 peak; FP8 reaches more of it than bfloat16 could."""
    routed_bytes: float = 315.5
    """Memory traffic for each number of a token that goes to an expert, over an update's three passes: routing, copies,
    and what grouped products lose against plain ones, expressed as bytes."""
    exposed_network: float = 0.416
    """Share of the traffic between machines that no computation hides."""


REINFORCEMENT = Efficiency(products=0.343, routed_bytes=691.0, exposed_network=0.91)
"""Of a trainer of mixtures of experts in bfloat16 with real lengths and real routing: 2.2 times slower than pretraining.
Fitted to NeMo-RL's step of Qwen3 30B-A3B (v0.6, on policy, 32 H100)."""


@dataclass(frozen=True)
class TrainingBatchWork:
    """What a trainer does with a batch."""

    lengths: Sequence[int]
    """Tokens of each sequence, its prompt among them."""
    passes: float = 3.0
    num_packs: int = 2**31
    """Packs that each replica passes through its pipeline between two updates, which the bubble follows from."""


def training_seconds(
    config: ModelConfig,
    parallel: ParallelConfig,
    gpu: Gpu,
    work: TrainingBatchWork,
    *,
    num_ranks: int,
    efficiency: Efficiency | None = None,
) -> float:
    """Seconds for ``work`` on ``num_ranks`` ranks with balanced packs; ``parallel`` fits them (``config.layout``)."""
    efficiency = efficiency or Efficiency()
    forward, tokens = flops_cost(config), sum(work.lengths)
    # Few distinct lengths are the rule: benchmarks have one.
    flops = sum(map(forward, work.lengths))
    products = work.passes * flops / (gpu.flops["bfloat16"] * efficiency.products)
    experts = work.passes / 3 * tokens * _expert_seconds(config, parallel, gpu, efficiency)
    return (products + experts) / num_ranks * _fullest_stage(parallel) * (1 + bubble(parallel, work.num_packs))


def _fullest_stage(parallel: ParallelConfig) -> float:
    """Layers of the pipeline stage that has most of them over the mean: the others wait for it."""
    layers, stages = parallel.pipeline_layers, parallel.pipeline_parallel_size
    return max(sum(layers[stage::stages]) for stage in range(stages)) * stages / sum(layers) if layers else 1.0


def bubble(parallel: ParallelConfig, num_packs: int) -> float:
    """Idle time of a pipeline over its busy time: (stages - 1) / (chunks * packs), arXiv 2104.04473 section 2.2."""
    return (parallel.pipeline_parallel_size - 1) / (parallel.virtual_pipeline_size * num_packs)


def _expert_seconds(config: ModelConfig, parallel: ParallelConfig, gpu: Gpu, efficiency: Efficiency) -> float:
    """Of one token over all layers with experts and an update's three passes, besides the matrix products."""
    layers, hidden = sum(has_experts(config)), dims(config)["hidden"]
    if not layers:
        return 0.0
    memory = efficiency.routed_bytes * text_config(config).num_experts_per_tok * hidden / gpu.hbm_bandwidth
    # Sent and returned in bfloat16, forward and backward, once to each machine that has one of the token's experts.
    network = 4 * 2 * hidden * _other_machines(config, parallel, gpu) / gpu.nic_bandwidth
    return layers * (memory + efficiency.exposed_network * network)


def _other_machines(config: ModelConfig, parallel: ParallelConfig, gpu: Gpu) -> float:
    """Machines besides its own that hold experts of a token, on average, where its choices are spread evenly."""
    machines = -(-parallel.expert_parallel_size * expert_tensor_size(parallel) // gpu.per_machine)
    groups, chosen_groups = router_groups(config)
    others = (machines - 1) * (1 - (1 - 1 / machines) ** text_config(config).num_experts_per_tok)
    return min(others, chosen_groups) if groups > 1 else others
