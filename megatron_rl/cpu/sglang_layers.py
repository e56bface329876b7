"""SGLang's small layers and its sampler on a CPU: a single compiled call each, instead of up to twenty PyTorch calls.

Invariant: in dense float32 models a token's result depends on nothing else in the batch, down to the last bit. MKL
multiplies a few rows with other code than many, so small matrices get at least ``MIN_ROWS``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.sampler import Sampler
from torch import Tensor

from megatron_rl.cpu import token_loops
from megatron_rl.cpu.layer_loop import MAX_PADDED_WEIGHTS, MIN_ROWS
from megatron_rl.cpu.simd import WIDTH


def install(dispatch_key: str) -> None:
    """Register the layers where SGLang looks up those of an out-of-tree platform, in this process."""
    for layer, forward in ((RMSNorm, rms_norm), (SiluAndMul, silu_and_mul)):
        BaseFusedOp.register_oot_forward(layer, forward, dispatch_key)
    for layer in _with_subclasses(RotaryEmbedding):
        if layer.forward_native is RotaryEmbedding.forward_native and layer.forward is RotaryEmbedding.forward:
            BaseFusedOp.register_oot_forward(layer, rotary_embedding, dispatch_key)
    UnquantizedLinearMethod.apply = lambda self, layer, x, bias=None: linear(x, layer.weight, bias)
    LogitsProcessor._compute_lm_head = _with_enough_rows(LogitsProcessor._compute_lm_head)


def _with_subclasses(kind: type) -> list[Any]:
    children: list[type] = kind.__subclasses__()
    return [kind, *[subclass for child in children for subclass in _with_subclasses(child)]]


def rms_norm(
    layer: RMSNorm,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compiled ``RMSNorm.forward_native``; x, residual: [..., hidden]."""
    plain = x.dtype == layer.weight.dtype == torch.float32 and x.is_contiguous() and x.shape[-1] == layer.hidden_size
    special = post_residual_addition is not None or layer.variance_size_override is not None
    if special or not plain or (residual is not None and (residual.dtype != x.dtype or not residual.is_contiguous())):
        return layer.forward_native(x, residual, post_residual_addition, quant_linear)
    output = torch.empty_like(x)
    token_loops.norm(
        x.data_ptr(),
        residual.data_ptr() if residual is not None else 0,
        layer.weight.data_ptr(),
        output.data_ptr(),
        x.numel() // layer.hidden_size,
        layer.hidden_size,
        layer.variance_epsilon,
    )
    return output if residual is None else (output, residual)


def silu_and_mul(layer: SiluAndMul, x: Tensor) -> Tensor:
    """Compiled SiLU gate; x: [tokens, a | b] -> silu(a) * b."""
    if x.dtype != torch.float32 or x.dim() != 2 or not x.is_contiguous():
        return layer.forward_native(x)
    size = x.shape[1] // 2
    output = x.new_empty(len(x), size)
    token_loops.gate(x.data_ptr(), output.data_ptr(), len(x), size)
    return output


def rotary_embedding(
    layer: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor, offsets: Any = None, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Compiled ``RotaryEmbedding.forward_native``, in place; query, key: [tokens, heads * head size]."""
    angles = layer.cos_sin_cache
    plain = all(x.dtype == angles.dtype == torch.float32 and x.dim() == 2 and x.stride(1) == 1 for x in (query, key))
    if not plain or positions.dim() != 1 or offsets is not None or args or any(kwargs.values()):
        return layer.forward_native(positions, query, key, offsets, *args, **kwargs)
    positions = positions.to(torch.int64).contiguous()
    for x in (query, key):
        num_heads = x.shape[1] // layer.head_size
        shape = (num_heads, layer.rotary_dim, int(layer.is_neox_style))
        token_loops.rotate(
            x.data_ptr(), x.stride(0), len(x), shape, positions.data_ptr(), angles.data_ptr(), layer.head_size
        )
    return query, key


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Linear layer, x: [..., in] -> [..., out]; few rows are padded to ``MIN_ROWS``."""
    num_rows = len(x)
    if x.dim() != 2 or not 0 < num_rows < MIN_ROWS or weight.numel() > MAX_PADDED_WEIGHTS:
        return F.linear(x, weight, bias)
    return F.linear(_padded(x), weight, bias)[:num_rows]


def _padded(x: Tensor) -> Tensor:
    padded = x.new_zeros(MIN_ROWS, x.shape[1])
    padded[: len(x)] = x
    return padded


def _with_enough_rows(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def compute_lm_head(self: LogitsProcessor, hidden_states: Tensor, lm_head: Any, *args: Any, **kwargs: Any) -> Tensor:
        num_rows = len(hidden_states)
        weight = getattr(lm_head, "weight", None)
        if not 0 < num_rows < MIN_ROWS or weight is None or weight.numel() > MAX_PADDED_WEIGHTS:
            return compute(self, hidden_states, lm_head, *args, **kwargs)
        return compute(self, _padded(hidden_states), lm_head, *args, **kwargs)[:num_rows]

    return compute_lm_head


class CompiledSampler(Sampler):
    """Seeded sampling from complete distributions in one pass; all other cases use SGLang's sampler."""

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: Any,
        token_ids_logprobs: Any,
        positions: Tensor,
        *,
        logprob_logits: Tensor | None = None,
    ) -> Tensor:
        logits = logits_output.next_token_logits
        whole = not (
            sampling_info.is_all_greedy
            or sampling_info.need_top_p_sampling
            or sampling_info.need_top_k_sampling
            or sampling_info.need_min_p_sampling
        )
        # Both lists are None if no request of the batch wants log-probs.
        other_tokens = return_logprob and (
            any(top_logprobs_nums) or any(ids is not None for ids in token_ids_logprobs)
        )
        more = other_tokens or logprob_logits is not None
        fits = logits.dtype == torch.float32 and len(logits) == len(positions)
        seeded = sampling_info.sampling_seed is not None and self.rl_on_policy_target is None
        if more or not (whole and fits and seeded) or sampling_info.sampling_mask_batch_indices is not None:
            return super().forward(
                logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions,
                logprob_logits=logprob_logits,
            )  # fmt: skip
        logits = self._preprocess_logits(logits, sampling_info)
        tokens, logprobs = sampled(logits, sampling_info.temperatures, sampling_info.sampling_seed, positions)
        if return_logprob:
            logits_output.next_token_logprobs = logprobs
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens


def sampled(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """A token per row and its log-prob. logits: [sequences, vocabulary] float32, may be overwritten; the others: [sequences]."""
    num_rows, size = logits.shape
    logits = logits.contiguous()  # logits are a view if the vocabulary is padded
    tokens, logprobs = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
    weights = torch.empty(size + WIDTH)
    temperatures = temperatures.to(torch.float32).contiguous()
    seeds, positions = seeds.to(torch.int64).contiguous(), positions.to(torch.int64).contiguous()
    draws = token_loops.SamplingArrays(temperatures.data_ptr(), seeds.data_ptr(), positions.data_ptr())
    token_loops.sample(
        logits.data_ptr(), num_rows, size, draws, tokens.data_ptr(), logprobs.data_ptr(), weights.data_ptr()
    )
    return tokens.to(torch.int32), logprobs
