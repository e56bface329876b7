"""What a model computes for a sequence, by its length: the cost that micro-batches are balanced by. Pure.

Counted are matrix products of the language model's forward pass, two operations per multiply-add:

- every weight matrix that a token passes: 2 * size, of a mixture's experts only the share that a token is routed to;
- causal attention: each token's query against the keys up to its own, and as many values: length * (length + 1) / 2
  pairs of tokens, each 2 * (rows of all queries + columns of all outputs) operations per layer.

The shapes come from the family's table, so a new family counts without a line here. A backward pass does each of the
products twice more (flash attention computes the scores once again), which moves the balance of the two parts little.
Not counted: embeddings (no product), vision encoders (their cost follows from images, not from the length), and that
the output layer runs for trained tokens alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from transformers import PretrainedConfig

from megatron_rl.families.facts import dims, text_config
from megatron_rl.families.parameters import Role, entries

_QUERIES = ("self_attn.q_proj.weight", "self_attn.q_b_proj.weight")
"""Tensors whose rows are the queries of all heads."""
_OUTPUTS = ("self_attn.o_proj.weight",)
"""Tensors whose columns are the attended values of all heads."""


@dataclass(frozen=True)
class ForwardFlops:
    """Floating-point operations of one forward pass over one sequence, as a function of its length [tokens]."""

    per_token: float
    """Of the weight matrices."""
    per_pair: float
    """Of attention, for each token and one that it sees (itself included), over all layers."""

    def __call__(self, length: int) -> float:
        return length * (self.per_token + self.per_pair * (length + 1) / 2)


def flops_cost(hf_config: PretrainedConfig, *, role: Role = "policy") -> ForwardFlops:
    """The cost function of a policy or critic, for ``batching.plan_microbatches``.

    Raises ValueError for a model family without a table.
    """
    shapes = {name: shape for entry in entries(hf_config, role) for name, shape in entry.hf.items()}
    text, experts = text_config(hf_config), dims(hf_config)["experts"]
    routed_share = text.num_experts_per_tok / experts if experts else 0.0
    per_token = 2.0 * sum(_passed_weights(name, shape, routed_share) for name, shape in shapes.items())
    if role == "policy" and hf_config.tie_word_embeddings:
        per_token += 2.0 * text.vocab_size * text.hidden_size
    return ForwardFlops(per_token, 2.0 * _attention_width(shapes))


def _passed_weights(name: str, shape: tuple[int, ...], routed_share: float) -> float:
    """Weights of a matrix that one token is multiplied with, on average."""
    if len(shape) < 2 or "embed_tokens" in name or "visual" in name:
        return 0.0
    return prod(shape) * (routed_share if ".experts." in name else 1.0)


def _attention_width(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Query rows plus output columns over all layers: multiply-adds of one pair of tokens."""
    queries = sum(shape[0] for name, shape in shapes.items() if name.endswith(_QUERIES))
    return queries + sum(shape[1] for name, shape in shapes.items() if name.endswith(_OUTPUTS))
