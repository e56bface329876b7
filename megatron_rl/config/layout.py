"""Arithmetic of parallel layouts: ranks per replica, layouts that do not fit, and short names.

Pure, without torch, so that a dry run and the checks before a launch can import this module.

A short name is sizes joined by "+": ``tp2``, ``tp2+sp+pp2``, ``ep2+etp1``, ``pp2+vpp2``, ``cp2``, ``dp2``,
``pp2+layers3/5``; after a number the "+" may be omitted (``tp2pp2``). Tensor parallelism of a mixture-of-experts
model needs ``sp``.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.config.schema import Config, ParallelConfig
from megatron_rl.config.schema.bounds import bound_problems
from megatron_rl.errors import ConfigError

SHORT_NAMES = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "vpp": "virtual_pipeline_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


def critic_layout(config: Config) -> ParallelConfig:
    """Layout of the critic and the process reward model over the ranks."""
    return config.critic.parallel or config.parallel


def ranks_of_replica(parallel: ParallelConfig) -> int:
    """Number of ranks with one copy of the model; they read the same batch."""
    return parallel.tensor_parallel_size * parallel.context_parallel_size * parallel.pipeline_parallel_size


def _ranks_of_experts(parallel: ParallelConfig) -> int:
    """Number of ranks of a pipeline stage with one copy of its experts."""
    return parallel.expert_parallel_size * expert_tensor_size(parallel)


def expert_tensor_size(parallel: ParallelConfig) -> int:
    return parallel.expert_tensor_parallel_size or parallel.tensor_parallel_size


def ranks_needed(parallel: ParallelConfig, data_parallel_size: int = 1) -> int:
    """Smallest number of ranks for this layout with at least ``data_parallel_size`` replicas."""
    in_stage = ranks_of_replica(parallel) // parallel.pipeline_parallel_size
    experts = _ranks_of_experts(parallel)
    # Expert groups fill the ranks of a stage only at multiples of this number of replicas.
    fitting = experts // math.gcd(experts, in_stage)
    return ranks_of_replica(parallel) * fitting * -(-data_parallel_size // fitting)


def fewest_ranks(config: Config) -> int:
    """Smallest number of ranks for the layouts of policy and critic."""
    return math.lcm(ranks_needed(config.parallel), ranks_needed(critic_layout(config)))


def layout_problems(parallel: ParallelConfig, world_size: int | None) -> Iterator[str]:
    """Yield the contradictions in ``parallel`` and its conflicts with ``world_size`` ranks (None or 0: unknown)."""
    too_small = list(bound_problems("parallel", parallel))
    if too_small:
        yield from too_small
        return
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    cp, ep = parallel.context_parallel_size, parallel.expert_parallel_size
    vpp, etp = parallel.virtual_pipeline_size, expert_tensor_size(parallel)
    model_ranks = ranks_of_replica(parallel)
    if world_size and world_size % model_ranks:
        sizes = f"parallel.tensor_parallel_size {tp} x parallel.pipeline_parallel_size {pp}"
        sizes += f" x parallel.context_parallel_size {cp}" if cp > 1 else ""
        yield (
            f"{world_size} ranks do not divide by {sizes} = {model_ranks}; start a multiple of {model_ranks} ranks or "
            "lower one of the sizes"
        )
    elif world_size and (world_size // pp) % (ep * etp):
        yield (
            f"{world_size} ranks make {world_size // pp} of a pipeline stage, which do not divide by "
            f"parallel.expert_parallel_size {ep} x parallel.expert_tensor_parallel_size {etp} = {ep * etp}"
        )
    if ep == 1 and etp != tp:
        # Megatron Core does not reduce the gradients of such experts over all ranks with a copy of them.
        yield (
            f"parallel.expert_tensor_parallel_size: without expert parallelism it must equal "
            f"parallel.tensor_parallel_size {tp}, got {etp}; set it to 0 or parallel.expert_parallel_size above 1"
        )
    if parallel.sequence_parallel and tp == 1:
        yield "parallel.sequence_parallel: shards over the tensor-parallel group, but parallel.tensor_parallel_size is 1"
    if vpp > 1 and pp == 1:
        yield f"parallel.virtual_pipeline_size: {vpp} chunks need a pipeline, but parallel.pipeline_parallel_size is 1"
    layers = parallel.pipeline_layers
    if layers and len(layers) != pp * vpp:
        yield (
            f"parallel.pipeline_layers: expected parallel.pipeline_parallel_size {pp} x parallel.virtual_pipeline_size "
            f"{vpp} = {pp * vpp} numbers, got {len(layers)}"
        )
    if any(number < 1 for number in layers):
        yield f"parallel.pipeline_layers: every stage has at least one layer, got {layers}"


def layers_problem(parallel: ParallelConfig, num_layers: int) -> str | None:
    """Reason why this layout cannot split ``num_layers`` layers into stages, or None."""
    layers, num_stages = parallel.pipeline_layers, parallel.pipeline_parallel_size * parallel.virtual_pipeline_size
    if layers and sum(layers) != num_layers:
        return f"num_hidden_layers {num_layers} is not the sum {sum(layers)} of parallel.pipeline_layers {layers}"
    if not layers and num_layers % num_stages:
        virtual = f" x parallel.virtual_pipeline_size {parallel.virtual_pipeline_size}"
        return (
            f"num_hidden_layers {num_layers} does not divide by parallel.pipeline_parallel_size "
            f"{parallel.pipeline_parallel_size}{virtual if parallel.virtual_pipeline_size > 1 else ''}"
            "; set parallel.pipeline_layers"
        )
    return None


def first_chunk_layers(parallel: ParallelConfig, num_layers: int) -> int:
    """Number of layers in the first stage, or in its first chunk if stages are interleaved."""
    num_chunks = parallel.pipeline_parallel_size * parallel.virtual_pipeline_size
    return parallel.pipeline_layers[0] if parallel.pipeline_layers else num_layers // num_chunks


def experts_problem(parallel: ParallelConfig, num_experts: int, expert_ffn: int) -> str | None:
    """Reason why a layer's ``num_experts`` experts (0: dense) of ``expert_ffn`` inner features do not fit, or None."""
    ep, etp = parallel.expert_parallel_size, expert_tensor_size(parallel)
    if num_experts == 0 and ep > 1:
        return f"layers have no experts to share over parallel.expert_parallel_size {ep}"
    if num_experts % ep:
        return f"{num_experts} experts do not divide by parallel.expert_parallel_size {ep}"
    if num_experts and expert_ffn % etp:
        return f"moe_intermediate_size {expert_ffn} does not divide by parallel.expert_tensor_parallel_size {etp}"
    if num_experts and parallel.tensor_parallel_size > 1 and not parallel.sequence_parallel:
        return "layers have experts, which with tensor parallelism need parallel.sequence_parallel=true (sp)"
    return None


def unsplit_problem(parallel: ParallelConfig, unsplit: Mapping[str, str]) -> str | None:
    """Reason why the layout splits a model in a way that its family does not support (``Family.unsplit``), or None."""
    for key, reason in unsplit.items():
        size = expert_tensor_size(parallel) if key == "expert_tensor_parallel_size" else getattr(parallel, key)
        if size > 1:
            remedy = ", with parallel.expert_parallel_size above 1" if key == "expert_tensor_parallel_size" else ""
            return f"family needs parallel.{key} 1, got {size}: {reason}; set it to 1{remedy}"
    return None


def of_critic(problem: str) -> str:
    """Rename the keys in ``problem``, a message on ``parallel``, to ``critic.parallel``."""
    return re.sub(r"(?<![\w.])parallel\b(?=[.:])", "critic.parallel", problem)


def megatron_stages(parallel: ParallelConfig) -> list[list[str]] | None:
    """Megatron's pipeline_model_parallel_layout, or None if all stages have the same number of layers."""
    if not parallel.pipeline_layers:
        return None
    stages = [["decoder"] * number for number in parallel.pipeline_layers]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def parse_layout(text: str, base: ParallelConfig | None = None) -> tuple[ParallelConfig, int]:
    """Parse ``text`` in short names into (layout, data-parallel size of at least 1).

    Raises ConfigError for a word that is not a size.
    """
    sizes: dict[str, Any] = {}
    data_parallel_size = 1
    for word in re.split(r"[+·*]|(?<=\d)(?=[a-z])", text.strip()):
        match = re.fullmatch(r"([a-z]+?)(\d{1,9})", word)
        stages = re.fullmatch(r"layers(\d{1,9}(?:/\d{1,9})*)", word)
        if word == "sp":
            sizes["sequence_parallel"] = True
        elif stages:
            sizes["pipeline_layers"] = [int(number) for number in stages[1].split("/")]
        elif match and match[1] == "dp":
            data_parallel_size = int(match[2])
        elif match and match[1] in SHORT_NAMES:
            sizes[SHORT_NAMES[match[1]]] = int(match[2])
        else:
            raise ConfigError(
                f"layout {text!r}: {word!r} is not a size; expected sp, layersN/M/... or one of "
                f"{', '.join(SHORT_NAMES)}, dp with a number, joined by '+', such as tp2+sp+pp2"
            )
    if data_parallel_size < 1:
        raise ConfigError(f"layout {text!r}: dp is at least 1")
    return replace(base or ParallelConfig(), **sizes), data_parallel_size
