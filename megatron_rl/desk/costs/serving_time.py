"""Seconds and memory of a server: a decode step as a roofline, prefill, and the capacity of its KV cache. Pure.

    decode step = max(weights read / memory bandwidth, matrix products / peak) + KV cache read / memory bandwidth
                  + states of linear attention read and written / memory bandwidth + floor + layers + sequences + all-reduces

A server is ``num_gpus`` GPUs under tensor parallelism, with weights and KV cache in bfloat16.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.desk.costs.gpus import Gpu
from megatron_rl.desk.costs.parameter_counts import ParameterCount, head_parameters, layer_parameters, num_parameters
from megatron_rl.families.family import ModelConfig, family_of
from megatron_rl.families.flops import flops_cost
from megatron_rl.families.model_facts import dims, has_experts, layer_kinds, layer_windows, text_config

_BYTES = 2
_STATES_PER_CACHE = 0.9
"""Memory of SGLang's states of linear attention over that of its KV cache (``--mamba-full-memory-ratio``)."""
_WINDOWED_TOKENS = 0.8
"""Tokens for which SGLang's cache has room in layers with a window, over those in the others (``--swa-full-tokens-ratio``)."""


@dataclass(frozen=True)
class ServerCosts:
    """Constants of a server's speed: fractions of the GPU's peaks that it reaches, and seconds in addition to the roofline.

    Rounded figures. Published measurements (rows of docs/estimates.md) support them: C6 bandwidth, C10 layer_s. sequence_s was chosen
    for C1 to C6, C10 and C21 to C24 together, after products got their own term. far_all_reduce_s is fitted to C4.
    """

    bandwidth: float = 0.75
    """Fraction of the peak memory bandwidth, in decode."""
    products: float = 0.5
    """Fraction of the bfloat16 peak, in prefill and decode."""
    floor_s: float = 0.002
    """Constant seconds per decode step: scheduling, sampling."""
    layer_s: float = 40e-6
    """Seconds per decode step and layer: kernel launches."""
    sequence_s: float = 30e-6
    """Seconds per decode step and running sequence: scheduling and sampling."""
    all_reduce_s: float = 15e-6
    """Seconds of an all-reduce within a node; two per layer."""
    far_all_reduce_s: float = 110e-6
    """Seconds of an all-reduce across nodes."""


StepSeconds = Callable[[float, float], float]
"""Maps (running sequences, mean tokens of their contexts) to the seconds of a decode step."""


def decode_curve(config: ModelConfig, gpu: Gpu, *, num_gpus: int, costs: ServerCosts | None = None) -> StepSeconds:
    """Seconds of a decode step of one server; in a step every running sequence gets one new token."""
    costs = costs or ServerCosts()
    layers, sizes = ParameterCount.sum(layer_parameters(config)), dims(config)
    dense = (layers.split + layers.replicated + head_parameters(config).number) * _BYTES / num_gpus
    experts = layers.experts * _BYTES / num_gpus
    missed = 1 - text_config(config).num_experts_per_tok / sizes["experts"] if any(has_experts(config)) else 0.0
    layer_s = costs.layer_s
    if num_gpus > 1:
        layer_s += 2 * (costs.far_all_reduce_s if num_gpus > gpu.per_machine else costs.all_reduce_s)
    added, cache = costs.floor_s + text_config(config).num_hidden_layers * layer_s, _layer_bytes(config, num_gpus)
    windows = Counter(_windows(config))
    states = 2 * state_bytes(config, num_gpus)
    bandwidth = gpu.hbm_bandwidth * costs.bandwidth
    token_s = flops_cost(config).per_token / (num_gpus * gpu.flops["bfloat16"] * costs.products)

    def seconds(running: float, context_tokens: float) -> float:
        # A mixture reads only the experts that at least one running token chose.
        weights_s = (dense + experts * (1 - missed**running)) / bandwidth
        read = sum(number * min(context_tokens, window or context_tokens) for window, number in windows.items())
        cache_s = running * (read * cache + states) / bandwidth
        return max(weights_s, token_s * running) + cache_s + added + costs.sequence_s * running

    return seconds


def prefill_seconds(
    config: ModelConfig, gpu: Gpu, *, num_gpus: int, lengths: Sequence[int], costs: ServerCosts | None = None
) -> float:
    """Seconds in which one server of ``num_gpus`` GPUs prefills sequences of ``lengths`` [tokens]; only FLOPs count."""
    costs = costs or ServerCosts()
    flops = sum(map(flops_cost(config), lengths))
    return flops / (num_gpus * gpu.flops["bfloat16"] * costs.products)


def kv_bytes(config: ModelConfig, num_gpus: int) -> float:
    """Bytes of KV cache per token on each GPU of a server."""
    windows = _windows(config)
    full = windows.count(None)
    return _layer_bytes(config, num_gpus) * (full + (_WINDOWED_TOKENS if full else 1) * (len(windows) - full))


def _windows(config: ModelConfig) -> list[int | None]:
    """The window of each layer with a KV cache; None: it attends to all tokens."""
    return [window for window, kind in zip(layer_windows(config), layer_kinds(config), strict=True) if not kind.is_linear]


def _layer_bytes(config: ModelConfig, num_gpus: int) -> float:
    """Bytes of one layer's KV cache per token on each GPU. Key and value heads are sharded down to one per GPU."""
    sizes = dims(config)
    if family_of(config).is_latent:
        return sizes["kv_down"] * _BYTES
    return 2 * max(sizes["groups"] / num_gpus, 1) * sizes["head_dim"] * _BYTES


def state_bytes(config: ModelConfig, num_gpus: int) -> float:
    """Bytes of a sequence's float32 states of linear attention on each GPU of a server."""
    sizes, layers = dims(config), sum(kind.is_linear for kind in layer_kinds(config))
    return layers and layers * sizes["linear_v"] * sizes["linear_key_dim"] * 4 / num_gpus


def kv_tokens(config: ModelConfig, gpu: Gpu, *, num_gpus: int, memory_fraction: float) -> float:
    """Tokens that fit into the KV cache of a server with ``memory_fraction`` of each GPU; 0 or less if the GPUs are too small."""
    free = gpu.hbm_bytes * memory_fraction - _BYTES * num_parameters(config) / num_gpus
    if state_bytes(config, num_gpus) and free > 0:
        free /= 1 + _STATES_PER_CACHE
    return free / kv_bytes(config, num_gpus)
