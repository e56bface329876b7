"""Computes the cost of a sequence from its length, by which micro-batches are balanced. Pure.

The cost is the matrix products of the language model's forward pass, two operations per multiply-add:

- every weight matrix that a token passes: 2 * size; for a mixture, only the fraction of experts a token is routed to;
- linear attention: three products with the state of each value head (read, write, query), and the products within a
  chunk of 64 tokens by which its recurrence runs in parallel (arXiv 2412.06464);
- causal attention: each token's query against all keys up to its own, and the same number of values. These are
  length * (length + 1) / 2 pairs of tokens, each 2 * (rows of all queries + columns of all outputs) operations per layer.
  In layers with a window, a token attends to at most that many tokens, itself included.

The shapes come from the family's table, so a new family needs no code here. A backward pass computes each product
two more times (flash attention also recomputes the scores), which hardly changes the ratio of both terms. Not
counted: embeddings (no product) and vision encoders (their cost depends on images, not on the length). The output
layer is counted for all tokens, although it runs only for trained tokens.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from megatron_rl.families.family import ModelConfig, family_of
from megatron_rl.families.model_facts import dims, layer_kinds, layer_windows, text_config
from megatron_rl.families.parameters import Role

_CHUNK_TOKENS = 64
_QUERIES = ("self_attn.q_proj.weight", "self_attn.q_b_proj.weight")
"""Tensors that make the queries of all heads."""
_OUTPUTS = ("self_attn.o_proj.weight",)
"""Tensors whose columns are the attended values of all heads."""


@dataclass(frozen=True)
class ForwardFlops:
    """Floating-point operations of one forward pass over one sequence, as a function of its length [tokens]."""

    per_token: float
    """Operations of the weight matrices per token."""
    per_pair: float
    """Operations of attention per pair of a token and a token that it attends to (or itself), over all layers without a window."""
    per_windowed_pair: Mapping[int, float]
    """``per_pair`` of the layers with a window, by the window's tokens."""

    def __call__(self, length: int) -> float:
        windowed = sum(per_pair * _num_pairs(length, window) for window, per_pair in self.per_windowed_pair.items())
        return length * (self.per_token + self.per_pair * (length + 1) / 2) + windowed


def _num_pairs(length: int, window: int) -> float:
    """Pairs of a token and a token that it attends to, if it attends to ``window`` tokens."""
    start = min(length, window)
    return start * (start + 1) / 2 + (length - start) * window


def flops_cost(hf_config: ModelConfig, *, role: Role = "policy") -> ForwardFlops:
    """The cost function of a policy or critic, for ``batching.plan_microbatches``.

    Raises ValueError for a model family without a table.
    """
    sizes, text = dims(hf_config), text_config(hf_config)
    # One layer of each kind is enough.
    kinds = layer_kinds(hf_config)
    layers = {kind: _matrices(hf_config, kinds.index(kind)) for kind in dict.fromkeys(kinds)}
    per_token = 2.0 * sum(
        number * sum(_passed_weights(matrix, text, sizes) for matrix in layers[kind]) for kind, number in Counter(kinds).items()
    )
    per_token += 2.0 * sizes["hidden"] * (1 if role == "critic" else sizes["vocab"])
    per_token += 2.0 * sum(kind.is_linear for kind in kinds) * _recurrence(sizes)
    widths = {kind: _attention_width(layer, sizes) for kind, layer in layers.items()}
    per_pair: dict[int | None, float] = {}
    for kind, window in zip(kinds, layer_windows(hf_config), strict=True):
        per_pair[window] = per_pair.get(window, 0.0) + 2.0 * widths[kind]
    windowed = {window: operations for window, operations in per_pair.items() if window is not None}
    return ForwardFlops(per_token, per_pair.get(None, 0.0), windowed)


def _recurrence(sizes: Mapping[str, int]) -> int:
    """Multiply-adds of the gated delta rule for one token of a layer; 0 for a family without linear attention."""
    if "linear_heads" not in sizes:
        return 0
    key, value = sizes["linear_key_dim"], sizes["linear_value_dim"]
    return sizes["linear_heads"] * (3 * key * value + _CHUNK_TOKENS * (3 * key + 2 * value))


_Matrix = tuple[str, tuple[str, ...], bool]
"""(Hugging Face name inside a layer, shape as size names, True if the tensor contains all experts)."""


def _matrices(config: ModelConfig, layer: int) -> tuple[_Matrix, ...]:
    rules = family_of(config).layer(config, layer)
    return tuple(
        (name, shape, rule.is_stacked) for rule in rules for name, shape in rule.hf.items() if len(shape) - rule.is_stacked > 1
    )


def _passed_weights(matrix: _Matrix, text: ModelConfig, sizes: Mapping[str, int]) -> float:
    """Number of weights that multiply one token, on average."""
    name, shape, is_stacked = matrix
    passed = prod(sizes[size] for size in shape)
    # A rule has one expert's tensors, or all experts' if they are stacked; a token passes num_experts_per_tok of them.
    if ".experts." in name:
        passed *= text.num_experts_per_tok
    return passed / sizes["experts"] if is_stacked else passed


def _attention_width(layer: tuple[_Matrix, ...], sizes: Mapping[str, int]) -> int:
    """Query rows plus output columns: multiply-adds of one pair of tokens."""
    # Not the tensor's rows, half of which may be gates.
    queries = sum(sizes["q"] for name, _, _ in layer if name.endswith(_QUERIES))
    return queries + sum(sizes[shape[1]] for name, shape, _ in layer if name.endswith(_OUTPUTS))
