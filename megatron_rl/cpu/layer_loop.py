"""All layers of a dense decoder (Llama, Qwen2, Qwen3) in one compiled call; PyTorch's own MKL multiplies the matrices.

Between the layers of a small model Python takes several times as long as the arithmetic. Everything is float32,
and tensors are passed as addresses; the caller (``sglang_fused_decoder.py``) has checked shapes, dtypes and strides.

Invariant: if matrices are small, a token's result depends on nothing else in the batch, down to the last bit. MKL
multiplies a few rows with other code than many, so such a matrix gets at least ``MIN_ROWS``.
"""

import os
from typing import NamedTuple

import llvmlite.binding
import torch
from numba import types

from megatron_rl.cpu.attention_loop import AttentionShape, KVPages, QueryTokens, attend
from megatron_rl.cpu.numba_compile import ONE, ZERO, compiled, inlined
from megatron_rl.cpu.simd import float_at, int_at, put_float, put_int32
from megatron_rl.cpu.token_loops import gate, norm, rotate

MIN_ROWS = 16
"""Number of rows from which each row of MKL's product is the same for any number of rows (measured with 2024.2)."""
MAX_PADDED_WEIGHTS = 1 << 20
"""Largest matrix whose rows are padded. A larger one is read from memory for each product, so extra rows would cost time."""
TABLE = (
    "input_norm qkv qkv_bias query_norm key_norm output output_bias mlp_norm gate_up down keys values".split()
)
"""Columns of the table of addresses, with a row per layer; 0 means that the layer has no such tensor."""
_COLUMNS = len(TABLE)
_ARGUMENTS = 64
"""Bytes of a product's arguments, at the start of the scratch memory."""

_sgemm = types.ExternalFunction("sgemm_", types.void(*[types.int64] * 13))


def has_mkl() -> bool:
    """True if PyTorch's library exports ``sgemm_``. Also makes the symbol available to compiled code of this process."""
    llvmlite.binding.load_library_permanently(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    return llvmlite.binding.address_of_symbol("sgemm_") is not None


class DecoderSizes(NamedTuple):
    """Sizes of a model, and fields that all its layers share."""

    num_layers: int
    hidden: int
    intermediate: int
    rotary: int
    is_neox: int
    epsilon: float
    cos_sin: int
    """Address of the array [positions, rotary]."""


class TokenArrays(NamedTuple):
    """New tokens of a batch: their number, and addresses of [tokens] int64."""

    num: int
    positions: int
    slots: int


@inlined
def _product(arguments: int, x: int, weight: int, bias: int, output: int, num_rows: int, num_in: int, num_out: int) -> None:
    """Matrix product: output [rows, out] = x [rows, in] . weight [out, in] (+ bias)."""
    rows = max(num_rows, MIN_ROWS) if num_in * num_out <= MAX_PADDED_WEIGHTS else num_rows
    put_int32(arguments, 0, 84)  # "T"
    put_int32(arguments, 1, 78)  # "N"
    put_int32(arguments, 2, num_out)
    put_int32(arguments, 3, rows)
    put_int32(arguments, 4, num_in)
    put_float(arguments, 5, ONE)
    put_float(arguments, 6, ONE if bias else ZERO)
    if bias:
        for row in range(rows):
            for i in range(num_out):
                put_float(output, row * num_out + i, float_at(bias, i))
    a = arguments
    _sgemm(a, a + 4, a + 8, a + 12, a + 16, a + 20, weight, a + 16, x, a + 16, a + 24, output, a + 8)


def scratch_floats(sizes: DecoderSizes, heads: AttentionShape, num_tokens: int) -> int:
    """Float32 values of scratch memory that ``layers`` needs, without those of ``attend``."""
    row = 2 * sizes.hidden + 3 * sizes.intermediate + (3 * heads.num + 2 * heads.num_kv) * heads.size
    return _ARGUMENTS // 4 + max(num_tokens, MIN_ROWS) * row


@inlined
def _norm_heads(heads: AttentionShape, num: int, fused: int, query_norm: int, key_norm: int, epsilon: float) -> None:
    """Apply RMSNorm to every query and key, in place; fused: [num, query | key | value]."""
    width = (heads.num + 2 * heads.num_kv) * heads.size
    for i in range(num):
        head = fused + 4 * i * width
        norm(head, 0, query_norm, head, heads.num, heads.size, epsilon)
        head += 4 * heads.num * heads.size
        norm(head, 0, key_norm, head, heads.num_kv, heads.size, epsilon)


@inlined
def _part_heads(heads: AttentionShape, num: int, fused: int, query: int, cache: KVPages, slots: int) -> None:
    """Split fused [num, query | key | value]: queries into query [num, heads, size], keys and values into the cache's slots."""
    size, num_query = heads.size, heads.num * heads.size
    width = num_query + 2 * heads.num_kv * size
    for i in range(num):
        source, slot = fused + 4 * i * width, int_at(slots, i)
        for j in range(num_query):
            put_float(query, i * num_query + j, float_at(source, j))
        for kv in range(heads.num_kv):
            key = cache.keys + 4 * (slot * cache.key_slot + kv * cache.key_head)
            value = cache.values + 4 * (slot * cache.value_slot + kv * cache.value_head)
            for j in range(size):
                put_float(key, j, float_at(source, num_query + kv * size + j))
                put_float(value, j, float_at(source, num_query + (heads.num_kv + kv) * size + j))


@compiled
def layers(
    sizes: DecoderSizes, heads: AttentionShape, pages: KVPages, rows: QueryTokens, tokens: TokenArrays,
    table: int, hidden: int, scratch: int,
) -> None:
    """Run all layers; hidden [max(tokens, MIN_ROWS), hidden] has embeddings on entry and the last norm's input on return.

    table: [layers, columns of TABLE] int64; pages: strides of any layer, keys and values are taken from the table;
    scratch: ``scratch_floats`` and ``attend``'s, without NaN.
    """
    num, size = tokens.num, heads.size
    num_rows = max(num, MIN_ROWS)
    width = (heads.num + 2 * heads.num_kv) * size
    normed = scratch + _ARGUMENTS
    added = normed + 4 * num_rows * sizes.hidden
    fused = added + 4 * num_rows * sizes.hidden
    query = fused + 4 * num_rows * width
    mixed = query + 4 * num_rows * heads.num * size
    both = mixed + 4 * num_rows * heads.num * size
    gated = both + 8 * num_rows * sizes.intermediate
    rest = gated + 4 * num_rows * sizes.intermediate
    for layer in range(sizes.num_layers):
        row = table + 8 * _COLUMNS * layer
        if layer:
            norm(added, hidden, int_at(row, 0), normed, num, sizes.hidden, sizes.epsilon)
        else:
            norm(hidden, 0, int_at(row, 0), normed, num, sizes.hidden, sizes.epsilon)
        _product(scratch, normed, int_at(row, 1), int_at(row, 2), fused, num, sizes.hidden, width)
        if int_at(row, 3):
            _norm_heads(heads, num, fused, int_at(row, 3), int_at(row, 4), sizes.epsilon)
        shape = (heads.num + heads.num_kv, sizes.rotary, sizes.is_neox)
        rotate(fused, width, num, shape, tokens.positions, sizes.cos_sin, size)
        cache = KVPages(
            int_at(row, 10), int_at(row, 11), pages.key_slot, pages.key_head, pages.value_slot, pages.value_head,
            0, pages.table, pages.table_row,
        )  # fmt: skip
        _part_heads(heads, num, fused, query, cache, tokens.slots)
        attend(heads, cache, rows, query, mixed, rest)
        _product(scratch, mixed, int_at(row, 5), int_at(row, 6), added, num, heads.num * size, sizes.hidden)
        norm(added, hidden, int_at(row, 7), normed, num, sizes.hidden, sizes.epsilon)
        _product(scratch, normed, int_at(row, 8), 0, both, num, sizes.hidden, 2 * sizes.intermediate)
        gate(both, gated, num, sizes.intermediate)
        _product(scratch, gated, int_at(row, 9), 0, added, num, sizes.intermediate, sizes.hidden)
    for i in range(num * sizes.hidden):
        put_float(hidden, i, float_at(hidden, i) + float_at(added, i))


def compile_now() -> None:
    """Compile the loop or load it from the cache, so that the first request does not wait for it."""
    layers(
        DecoderSizes(0, 1, 1, 2, 1, 1e-6, 0), AttentionShape(1, 1, 2, 2, 1.0, -1), KVPages(*[0] * 9),
        QueryTokens(0, 0, 0, 0), TokenArrays(0, 0, 0), 0, 0, 0,
    )
