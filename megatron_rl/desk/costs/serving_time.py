"""Seconds and memory of a server: a decode step as a roofline, prefill, and the capacity of its KV cache. Pure.

    decode step = (weights read + KV cache read) / memory bandwidth + floor + a little per sequence + all-reduces

A server is ``num_gpus`` GPUs under tensor parallelism, with weights and KV cache in bfloat16.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.desk.costs.gpus import Gpu
from megatron_rl.desk.costs.parameter_counts import ParameterCount, head_parameters, layer_parameters, num_parameters
from megatron_rl.families.family import ModelConfig, family_of
from megatron_rl.families.flops import flops_cost
from megatron_rl.families.model_facts import dims, has_experts, text_config

_BYTES = 2


@dataclass(frozen=True)
class ServerCosts:
    """Seconds that a server adds to the roofline, and the fractions of the peaks that it reaches.

    Rounded figures, chosen with published steps at hand (docs/estimates.md: bandwidth C6, sequence_s C1 and C2,
    layer_s C10); far_all_reduce_s is fitted to C4.
    """

    bandwidth: float = 0.75
    products: float = 0.5
    """Fraction of the bfloat16 peak, in prefill."""
    floor_s: float = 0.002
    """Constant seconds per decode step: scheduling, sampling."""
    layer_s: float = 40e-6
    """Seconds per decode step and layer: kernel launches."""
    sequence_s: float = 40e-6
    """Seconds per decode step and running sequence."""
    all_reduce_s: float = 15e-6
    """Seconds of an all-reduce within a node; two per layer."""
    far_all_reduce_s: float = 110e-6
    """Seconds of an all-reduce across nodes."""


StepSeconds = Callable[[float, float], float]
"""Maps (running sequences, mean tokens of their contexts) to the seconds of a decode step."""


def decode_curve(config: ModelConfig, gpu: Gpu, *, num_gpus: int, costs: ServerCosts | None = None) -> StepSeconds:
    """``decode_seconds`` of one server as a function, for callers that evaluate it often."""
    costs = costs or ServerCosts()
    layers, sizes = ParameterCount.sum(layer_parameters(config)), dims(config)
    dense = (layers.split + layers.replicated + head_parameters(config).number) * _BYTES / num_gpus
    experts = layers.experts * _BYTES / num_gpus
    missed = 1 - text_config(config).num_experts_per_tok / sizes["experts"] if any(has_experts(config)) else 0.0
    layer_s = costs.layer_s
    if num_gpus > 1:
        layer_s += 2 * (costs.far_all_reduce_s if num_gpus > gpu.per_machine else costs.all_reduce_s)
    added, cache = costs.floor_s + text_config(config).num_hidden_layers * layer_s, kv_bytes(config, num_gpus)

    def seconds(running: float, context_tokens: float) -> float:
        # A mixture reads only the experts that at least one running token chose.
        read = dense + experts * (1 - missed**running) + running * context_tokens * cache
        return read / (gpu.hbm_bandwidth * costs.bandwidth) + added + costs.sequence_s * running

    return seconds


def decode_seconds(
    config: ModelConfig,
    gpu: Gpu,
    *,
    num_gpus: int,
    running: float,
    context_tokens: float,
    costs: ServerCosts | None = None,
) -> float:
    """Seconds of one decode step: ``running`` sequences of ``context_tokens`` each, one new token for each."""
    return decode_curve(config, gpu, num_gpus=num_gpus, costs=costs)(running, context_tokens)


def prefill_seconds(
    config: ModelConfig, gpu: Gpu, *, num_gpus: int, lengths: Sequence[int], costs: ServerCosts | None = None
) -> float:
    """Seconds to fill the KV cache with sequences of ``lengths`` [tokens]."""
    costs = costs or ServerCosts()
    flops = sum(map(flops_cost(config), lengths))
    return flops / (num_gpus * gpu.flops["bfloat16"] * costs.products)


def kv_bytes(config: ModelConfig, num_gpus: int) -> float:
    """Bytes of KV cache per token on each GPU of a server. Key and value heads are sharded down to one per GPU."""
    sizes, layers = dims(config), text_config(config).num_hidden_layers
    if family_of(config).is_latent:
        return layers * sizes["kv_down"] * _BYTES
    return layers * 2 * max(sizes["groups"] / num_gpus, 1) * sizes["head_dim"] * _BYTES


def kv_tokens(config: ModelConfig, gpu: Gpu, *, num_gpus: int, memory_fraction: float) -> float:
    """Tokens that fit into the KV cache of a server with ``memory_fraction`` of each GPU; 0 or less if the GPUs are too small."""
    free = gpu.hbm_bytes * memory_fraction - _BYTES * num_parameters(config) / num_gpus
    return free / kv_bytes(config, num_gpus)


def generation_seconds(
    step_seconds: StepSeconds, lengths: Sequence[int], *, prompt_tokens: float, max_running: int
) -> float:
    """Seconds until a server has generated responses of ``lengths`` [tokens], started in this order.

    At most ``max_running`` run at the same time; each one that ends lets the next one start.
    """
    waiting, seconds, step = list(reversed(lengths)), 0.0, 0
    ends: list[int] = []  # decode steps in which running responses end
    started = 0  # sum of the decode steps in which they started
    starts: dict[int, list[int]] = {}
    while waiting or ends:
        while waiting and len(ends) < max_running:
            end = step + waiting.pop()
            heapq.heappush(ends, end)
            starts.setdefault(end, []).append(step)
            started += step
        until = ends[0]
        context = prompt_tokens + (step + until) / 2 - started / len(ends)
        seconds += (until - step) * step_seconds(len(ends), context)
        step = until
        for first in starts.pop(until):
            heapq.heappop(ends)
            started -= first
    return seconds


def stream_seconds(
    step_seconds: StepSeconds, lengths: Sequence[int], *, prompt_tokens: float, max_running: int
) -> float:
    """Seconds per batch of a server that never drains: batches like ``lengths`` follow one another."""
    # Filling and draining cancel in the difference of two runs, if both are longer than the running responses.
    times = max(3, -(-3 * max_running // len(lengths)))
    few, more = (
        generation_seconds(step_seconds, [*lengths] * number, prompt_tokens=prompt_tokens, max_running=max_running)
        for number in (times, 2 * times)
    )
    return (more - few) / times
