"""The policy: a causal language model whose head is applied late, to the tokens that matter only.

``forward`` (from ``packed_gpt.py``) returns hidden states on the last stage; ``token_logprobs`` turns the masked ones into
log-probabilities and entropies. Logits never exist for more than a chunk of tokens and a rank's share of the
vocabulary.
"""

import torch
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor, nn
from transformers import PretrainedConfig

from megatron_rl.config.schema import ParallelConfig, Recompute
from megatron_rl.data.batch import PackedBatch
from megatron_rl.families.model_facts import text_config, vision_token_ids
from megatron_rl.models.hf.tensor_sources import RandomSource
from megatron_rl.models.hf.weights import fill
from megatron_rl.models.layers.context import rows_of_tokens, sum_over_context
from megatron_rl.models.logprobs import DEFAULT_CHUNK_SIZE, token_logprobs_and_entropy
from megatron_rl.models.megatron_fields import PLAIN, MegatronSettings
from megatron_rl.models.packed_gpt import PackedGPTModel, build_chunks, forward, sequence_starts, unwrap

__all__ = ["build_policy", "forward", "token_logprobs"]


def build_policy(
    hf_config: PretrainedConfig,
    parallel: ParallelConfig,
    *,
    dtype: torch.dtype,
    recompute: Recompute = Recompute.none,
    settings: MegatronSettings = PLAIN,
    fp32_head: bool = False,
    seed: int | None,
) -> list[PackedGPTModel]:
    """This rank's part of the policy, not yet wrapped for data parallelism; ``topology.initialize`` comes first.

    Weights are normal with the configuration's ``initializer_range`` and the same on every layout of ranks. ``seed`` None leaves
    them uninitialised, for ``load_weights`` to fill. Raises ValueError where the model does not fit the layout.
    """
    chunks = build_chunks(
        hf_config,
        parallel,
        dtype=dtype,
        recompute=recompute,
        share_embeddings=bool(hf_config.tie_word_embeddings),
        settings=settings,
    )
    excluded = vision_token_ids(hf_config)
    for chunk in chunks:
        chunk.fp32_head = fp32_head
        chunk.excluded_token_ids = excluded
        if chunk.post_process:
            # The layer itself stays: its weight, its marks, its checkpoint layout and its hooks are Megatron's.
            chunk.output_layer.forward = _defer_head
    if seed is not None:
        fill(chunks, hf_config, RandomSource(seed, text_config(hf_config).initializer_range), role="policy")
    return chunks


def _defer_head(
    hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
) -> tuple[Tensor, None]:
    """In the output layer's place: pass the hidden states on."""
    return hidden, None


def token_logprobs(
    chunk: nn.Module,
    output: Tensor,
    batch: PackedBatch,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """(logprobs [T], entropy [T]) of the batch's tokens, float32, from the last stage's ``forward`` output.

    Entry t speaks of token t given the tokens before it: its log-probability and the entropy of the distribution it
    was drawn from, both at ``temperature`` and over the tokens that responses may have (not those of images). Entries
    are 0 at sequence starts and where ``mask`` [T] bool is False; those tokens do not reach the head. Differentiable.
    All ranks of a tensor- or context-parallel group call it and get the same result.
    """
    model = unwrap(chunk)
    tokens = batch.tokens.to(output.device)
    wanted = torch.ones_like(tokens, dtype=torch.bool)
    if mask is not None:
        wanted &= mask.to(output.device)
    wanted[sequence_starts(batch, output.device)] = False
    targets = wanted.nonzero()[:, 0]
    places = targets - 1
    rows = rows_of_tokens(tuple(batch.lengths.tolist()), model.config, output.device)
    if rows is not None:
        here = rows[places] >= 0
        targets, places = targets[here], rows[places[here]]
    hidden = output.squeeze(0)
    if model.config.sequence_parallel:
        # Backward reduce-scatters: each rank's gradient covers its part of the vocabulary.
        hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        hidden = hidden.index_select(0, places)
    else:
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden.index_select(0, places))
    logprobs, entropy = token_logprobs_and_entropy(
        hidden,
        _head_weight(model),
        tokens[targets],
        vocab_size=model.real_vocab_size,
        temperature=temperature,
        group=parallel_state.get_tensor_model_parallel_group(),
        chunk_size=chunk_size,
        excluded=model.excluded_token_ids,
        exact_gradients=model.fp32_head,
    )
    zeros = torch.zeros(len(tokens), dtype=logprobs.dtype, device=output.device)
    both = torch.stack([zeros.index_put((targets,), logprobs), zeros.index_put((targets,), entropy)])
    logprobs, entropy = sum_over_context(both, model.config)
    return logprobs, entropy


def _head_weight(model: PackedGPTModel) -> Tensor:
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight
