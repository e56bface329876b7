"""Gated DeltaNet in SGLang 0.5.23 on a CPU: PyTorch functions where SGLang calls Triton kernels or sgl_kernel.

A request has a slot with its convolution's last inputs [channels, kernel - 1] and its state [heads, value, key dimensions],
which prefill and decode update in place.
"""

import itertools
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_rl.cpu.delta_rule import causal_conv1d, chunk_gated_delta_rule, l2norm

_RUNNING_REQUESTS = 2048
"""Requests of a server that has no ``max-running-requests``: the least that SGLang assumes."""
_STATES_PER_REQUEST = 4
"""Three of a running request, as SGLang counts for its prefix cache without extra buffers, and one of a prefix that waits."""


def bound_states(configurator: Any) -> None:
    """Give SGLang's states the room that its requests need at most, not half of the node's memory.

    ``configurator`` is SGLang's class that sizes the pools. Servers started with ``max-mamba-cache-size`` keep it.
    """
    by_memory = configurator._handle_max_mamba_cache

    def handle_max_mamba_cache(own: Any, free_gb: float) -> float:
        from sglang.srt.runtime_context import get_context, get_schedule

        given, left_gb = get_schedule().max_mamba_cache_size, by_memory(own, free_gb)
        needed = _STATES_PER_REQUEST * (get_schedule().max_running_requests or _RUNNING_REQUESTS)
        if given is None and needed < get_schedule().max_mamba_cache_size:
            get_context().override("mamba_pool.requests", max_mamba_cache_size=needed)
        return left_gb

    configurator._handle_max_mamba_cache = handle_max_mamba_cache


def install(model: nn.Module) -> None:
    """Replace the kernels in the modules of SGLang that call them, if ``model`` has linear attention."""
    if not any(type(module).__name__ == "RadixLinearAttention" for module in model.modules()):
        return
    from sglang.kernels.ops.attention.fla import layernorm_gated
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.linear.kernels import gdn_triton
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.models import qwen2_moe

    bound_states(KVCacheConfigurator)
    FusedRMSNormGated.forward = layernorm_gated.RMSNorm.forward = _gated_norm
    gdn_triton.TritonGDNKernel.supports_packed_decode = False
    replaced: dict[Any, dict[str, Any]] = {
        gdn_backend: dict(
            causal_conv1d_fn=_convolve, causal_conv1d_update=_convolve_token, fused_gdn_gating=_decays_and_steps
        ),
        gdn_triton: dict(chunk_gated_delta_rule=_prefill, fused_sigmoid_gating_delta_rule_update=_decode),
        qwen2_moe: dict(fused_gate_sigmoid_mul_add=_add_gated),
    }
    for name, function in (
        ("fused_sigmoid_mul", _gated),
        ("fused_qkvzba_split_reshape_cat", _split_by_head),
        ("fused_qkvzba_split_reshape_cat_contiguous", _split_sections),
    ):
        for file in ("qwen3_next", "qwen3_5"):
            module = sys.modules.get(f"sglang.srt.models.{file}")
            if module is not None and name in vars(module):
                replaced.setdefault(module, {})[name] = function
    for module, functions in replaced.items():
        vars(module).update(functions)


def _gated_norm(norm: Any, x: Tensor, gate: Tensor) -> Tensor:
    """RMSNorm of x [rows, d], times the activation of the gate [rows, d]."""
    wide = F.rms_norm(x.float(), (x.shape[-1],), norm.weight.float(), norm.eps)
    activated = torch.sigmoid(gate.float()) if norm.activation == "sigmoid" else F.silu(gate.float())
    return (wide * activated).to(x.dtype)


def _gated(x: Tensor, gate: Tensor, inplace: bool = False) -> Tensor:
    """Attended values x [T, channels] times the sigmoid of the gate."""
    gated = torch.sigmoid(gate).reshape(x.shape)
    return x.mul_(gated) if inplace else x * gated


def _add_gated(hidden: Tensor, gate: Tensor, shared: Tensor, total: Tensor) -> None:
    """Add the shared expert's output [T, hidden] to ``total``, times the gate of each token."""
    total.add_(torch.sigmoid(hidden @ gate)[:, None] * shared)


def _split_by_head(
    qkvz: Tensor, ba: Tensor, num_key_heads: int, num_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values [T, channels], gates [T, heads, value_dim], b and a [T, heads]; inputs are ordered by key heads."""
    shared = num_heads // num_key_heads
    widths = [key_dim, key_dim, shared * value_dim, shared * value_dim]
    *qkv, z = qkvz.unflatten(-1, (num_key_heads, -1)).split(widths, -1)
    b, a = (part.flatten(1) for part in ba.unflatten(-1, (num_key_heads, -1)).split(shared, -1))
    return torch.cat([part.flatten(1) for part in qkv], -1), z.reshape(len(z), num_heads, value_dim), b, a


def _split_sections(
    qkvz: Tensor, ba: Tensor, num_key_heads: int, num_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``_split_by_head`` of inputs that are ordered by sections."""
    values = num_heads * value_dim
    qkv, z = qkvz.split([2 * num_key_heads * key_dim + values, values], -1)
    b, a = ba.split(num_heads, -1)
    return qkv.contiguous(), z.unflatten(-1, (num_heads, value_dim)).contiguous(), b.contiguous(), a.contiguous()


def _decays_and_steps(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Log-decay and step of the update of each head, [1, T, heads] float32."""
    decays = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decays[None], torch.sigmoid(b.float())[None]


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    activation: str | None = "silu",
    **_: Any,
) -> Tensor:
    """Convolve new tokens x [channels, T] of several requests, each after the inputs in its slot."""
    rows, kept, ends = x.T, weight.shape[1] - 1, query_start_loc.tolist()
    parts = []
    for slot, has_state, (start, end) in zip(cache_indices, has_initial_state, itertools.pairwise(ends), strict=True):
        before = conv_states[slot].T * has_state
        parts.append(torch.cat([before.to(rows.dtype), rows[start:end]]))
        conv_states[slot] = parts[-1][len(parts[-1]) - kept :].T.to(conv_states.dtype)
    lengths = torch.tensor([0, *map(len, parts)]).cumsum(0)
    out, _none = causal_conv1d(torch.cat(parts)[None], weight, bias, activation, lengths)
    return torch.cat([part[kept:] for part in out[0].split([len(part) for part in parts])]).T


def _convolve_token(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """``_convolve`` of one token per request, x [requests, channels]."""
    slots = conv_state_indices.long()
    window = torch.cat([conv_states[slots].to(x.dtype), x[..., None]], -1)
    conv_states[slots] = window[..., 1:].to(conv_states.dtype)
    out = (window * weight).sum(-1) + (0 if bias is None else bias)
    return F.silu(out) if activation in ("silu", "swish") else out


def _prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """Outputs [1, T, heads, value] of several requests; ``initial_state`` has the states of all slots, [.., heads, value, key]."""
    slots, shared = initial_state_indices.long(), v.shape[2] // q.shape[2]
    q, k = (rows.repeat_interleave(shared, 2) for rows in (q, k))
    out, states = chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=initial_state[slots].mT,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_seqlens,
    )
    if states is not None:
        initial_state[slots] = states.mT.to(initial_state.dtype)
    return out, None, None


def _decode(  # noqa: PLR0913 (SGLang has these)
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """``_prefill`` of one token per request, [1, requests, heads, ...]."""
    slots, shared = initial_state_indices.long(), v.shape[2] // q.shape[2]
    g, beta = _decays_and_steps(A_log, a, b, dt_bias)
    # Products and sums by element, so that a token's result does not depend on the other requests.
    query, key = (l2norm(rows[0].float()).repeat_interleave(shared, 1)[:, :, None] for rows in (q, k))
    state = initial_state_source[slots].float() * g[0].exp()[..., None, None]
    change = (v[0].float() - (state * key).sum(-1)) * beta[0][..., None]
    state = state + change[..., None] * key
    initial_state_source[slots] = state.to(initial_state_source.dtype)
    return (state * query * q.shape[-1] ** -0.5).sum(-1)[None].to(v.dtype)
