"""Replaces the forward of SGLang's dense decoders by one compiled call for all layers (``layer_loop.py``), if they fit."""

from typing import Any

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from megatron_rl.cpu import layer_loop
from megatron_rl.cpu.attention_loop import AttentionShape, pages_of, scratch_floats
from megatron_rl.cpu.sglang_attention import PagedTorchNativeAttnBackend

_MODELS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_MAX_SCRATCH_FLOATS = 1 << 27
_WEIGHTS = (
    "input_layernorm.weight self_attn.qkv_proj.weight self_attn.qkv_proj.bias self_attn.q_norm.weight self_attn.k_norm.weight "
    "self_attn.o_proj.weight self_attn.o_proj.bias post_attention_layernorm.weight mlp.gate_up_proj.weight mlp.down_proj.weight"
).split()
"""The first columns of ``layer_loop.TABLE``, by their names in a layer."""


def fuse(model: Any) -> None:
    """Replace the forward of ``model.model``. Models that do not fit, and calls with other inputs, keep SGLang's forward."""
    if _fits(model) and layer_loop.has_mkl():
        layer_loop.compile_now()
        model.model.forward = _FusedLayers(model.model)


def _fits(model: Any) -> bool:
    if type(model).__name__ not in _MODELS or any(p.dtype != torch.float32 for p in model.parameters()):
        return False
    layers = list(model.model.layers)
    linears = [
        linear
        for layer in layers
        for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
    ]
    rotary = layers[0].self_attn.rotary_emb
    attentions = [layer.self_attn.attn for layer in layers]
    return (
        get_parallel().tp_size == get_parallel().pp_size == 1
        and all(type(linear.quant_method) is UnquantizedLinearMethod for linear in linears)
        and all(layer.mlp.gate_up_proj.bias is None and layer.mlp.down_proj.bias is None for layer in layers)
        and type(rotary).forward_native is RotaryEmbedding.forward_native
        and type(rotary).forward is RotaryEmbedding.forward
        and rotary.cos_sin_cache.dtype == torch.float32
        and all(layer.self_attn.rotary_emb is rotary for layer in layers)
        and all(a.sliding_window_size == -1 and not a.logit_cap and a.qk_head_dim == a.v_head_dim for a in attentions)
    )


class _FusedLayers:
    """Replaces ``forward`` of SGLang's ``LlamaModel`` and ``Qwen2Model``."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._own = model.forward
        first = model.layers[0]
        attention = first.self_attn.attn
        self._heads = AttentionShape(
            attention.tp_q_head_num,
            attention.tp_k_head_num,
            attention.qk_head_dim,
            attention.v_head_dim,
            float(attention.scaling),
            -1,
        )
        self._scratch = torch.zeros(0)
        self._layer_ids = [layer.self_attn.attn.layer_id for layer in model.layers]
        self._weights = [_holders(layer) for layer in model.layers]

    def _sizes(self) -> layer_loop.DecoderSizes:
        model, first = self._model, self._model.layers[0]
        rotary = first.self_attn.rotary_emb
        return layer_loop.DecoderSizes(
            len(model.layers),
            model.norm.hidden_size,
            first.mlp.down_proj.weight.shape[1],
            rotary.rotary_dim,
            int(rotary.is_neox_style),
            float(model.norm.variance_epsilon),
            rotary.cos_sin_cache.data_ptr(),
        )

    def _table(self, pool: Any) -> Tensor:
        """Addresses [layers, columns of TABLE], read at each step, because a weight update may move the weights."""
        rows = [[w.data_ptr() if (w := held.get(name)) is not None else 0 for held, name in layer] for layer in self._weights]
        for row, index in zip(rows, self._layer_ids, strict=True):
            row += pool.get_key_buffer(index).data_ptr(), pool.get_value_buffer(index).data_ptr()
        return torch.tensor(rows)

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        backend, model = get_attn_backend(), self._model
        rows = backend.rows if isinstance(backend, PagedTorchNativeAttnBackend) else None
        more = input_embeds is not None or pp_proxy_tensors is not None or model.layers_to_capture
        if more or rows is None or backend.use_sliding_window_kv_pool or positions.dim() != 1:
            return self._own(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        pool, requests = backend.token_to_kv_pool, backend.req_to_token_pool.req_to_token
        pages = pages_of(pool.get_key_buffer(0), pool.get_value_buffer(0), requests)
        sizes, heads, num = self._sizes(), self._heads, len(input_ids)
        num_scratch = layer_loop.scratch_floats(sizes, heads, num)
        num_scratch += scratch_floats(heads.size, requests.shape[1])
        if pages.is_half or num_scratch > _MAX_SCRATCH_FLOATS:
            return self._own(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        if len(self._scratch) < num_scratch:
            self._scratch = torch.zeros(num_scratch)
        hidden = torch.zeros(max(num, layer_loop.MIN_ROWS), sizes.hidden)
        hidden[:num] = model.embed_tokens(input_ids)
        # Only their addresses are passed on: the names keep the memory of both tensors until the call returns.
        indices = positions.to(torch.int64).contiguous(), forward_batch.out_cache_loc.to(torch.int64).contiguous()
        tokens = layer_loop.TokenArrays(num, indices[0].data_ptr(), indices[1].data_ptr())
        table = self._table(pool)
        layer_loop.layers(
            sizes, heads, pages, rows, tokens, table.data_ptr(), hidden.data_ptr(), self._scratch.data_ptr()
        )
        return model.norm(hidden[:num])


def _holders(layer: Any) -> list[tuple[dict[str, Tensor | None], str]]:
    """For each of ``_WEIGHTS`` the dict that holds it and its key, which are read faster than attributes of modules."""
    modules = dict(layer.named_modules())
    paths = [path.rpartition(".") for path in _WEIGHTS]
    return [(modules[module]._parameters if module in modules else {}, name) for module, _, name in paths]
