"""The policy: a causal language model whose head is applied separately, and only to the tokens in a mask.

``forward`` (from ``packed_gpt.py``) returns hidden states on the last stage; ``token_logprobs`` turns the hidden
states in the mask into log-probabilities and entropies. Logits exist for at most one chunk of tokens and a rank's
slice of the vocabulary.
"""

import torch
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor, nn
from transformers import PretrainedConfig

from megatron_rl.config.schema import ParallelConfig, Recompute
from megatron_rl.data.batch import ALSO_WANTED, PackedBatch, moved
from megatron_rl.families.family import family_of
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
    """This rank's part of the policy, not yet wrapped for data parallelism. Requires ``topology.initialize``.

    Weights are normal with the configuration's ``initializer_range`` and the same in every parallel layout. With
    ``seed`` None they stay uninitialized, for ``load_weights`` to fill. Raises ValueError if the model does not fit
    the layout.
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
            # Only forward is replaced: the layer's weight, marks, checkpoint layout and hooks stay Megatron's.
            chunk.output_layer.forward = _defer_head
    if seed is not None:
        source = RandomSource(seed, text_config(hf_config).initializer_range, family_of(hf_config).fresh)
        fill(chunks, hf_config, source, role="policy")
    return chunks


def _defer_head(
    hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
) -> tuple[Tensor, None]:
    """Replacement of the output layer's forward: returns the hidden states."""
    return hidden, None


def wanted_tokens(batch: PackedBatch) -> Tensor:
    """[T] bool, in host memory: the tokens whose log-probs a pass computes."""
    wanted = batch.fields["mask"] != 0
    for name in ALSO_WANTED:
        if name in batch.fields:
            wanted = wanted | (batch.fields[name] != 0)
    return wanted


def read_outputs(batch: PackedBatch) -> Tensor | None:
    """[T] bool: the tokens before the wanted ones, whose outputs give their log-probs; None: all."""
    wanted = wanted_tokens(batch)[1:]
    return torch.cat([wanted, wanted.new_zeros(1)]) if wanted.any() else None


def token_logprobs(
    chunk: nn.Module,
    output: Tensor,
    batch: PackedBatch,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    others: Tensor | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """Log-probs [T] and entropies [T] of the batch's tokens, float32, from the last stage's ``forward`` output.

    With ``others`` [T, k], ids of other tokens for the position of each token, log-probs are [T, 1 + k], the token's own first.

    Entry t is the log-probability of token t given the preceding tokens, and the entropy of the distribution that
    token t was sampled from. Both are at ``temperature`` and over the tokens that responses may contain (no image
    tokens). Entries are 0 at sequence starts and where ``mask`` [T] bool is False; these tokens do not reach the
    head. ``batch`` and ``mask`` are in host memory. Differentiable. Collective over the tensor- and context-parallel
    ranks, which all get the same result.
    """
    model, device = unwrap(chunk), output.device
    # In host memory: the number of targets is needed here, and reading it from the device would wait for the pass.
    wanted = torch.ones_like(batch.tokens, dtype=torch.bool) if mask is None else mask.clone()
    wanted[sequence_starts(batch)] = False
    targets = wanted.nonzero()[:, 0]
    sources = targets - 1
    rows = rows_of_tokens(batch.lengths.tolist(), model.config)
    if rows is not None:
        is_local = rows[sources] >= 0
        targets, sources = targets[is_local], rows[sources[is_local]]
    labels = batch.tokens[targets]
    if others is not None:
        labels = torch.cat([labels[:, None], others[targets].to(labels.dtype)], 1)
    labels, sources, targets = (moved(index, device) for index in (labels, sources, targets))
    hidden = output.squeeze(0)
    if model.config.sequence_parallel:
        # Backward reduce-scatters, because each rank's gradient covers only its slice of the vocabulary.
        hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        hidden = hidden.index_select(0, sources)
    else:
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden.index_select(0, sources))
    logprobs, entropy = token_logprobs_and_entropy(
        hidden,
        head_weight(model),
        labels,
        vocab_size=model.real_vocab_size,
        temperature=temperature,
        group=parallel_state.get_tensor_model_parallel_group(),
        chunk_size=chunk_size,
        excluded=model.excluded_token_ids,
        exact_gradients=model.fp32_head,
    )

    def spread(values: Tensor) -> Tensor:
        """``values`` at the targets' places in [T, ...], 0 elsewhere."""
        whole = values.new_zeros(len(wanted), *values.shape[1:]).index_put((targets,), values)
        return sum_over_context(whole, model.config)

    # Each on its own: a loss without entropy then gives it no gradient, and the head computes none.
    return spread(logprobs), spread(entropy)


def head_weight(model: PackedGPTModel) -> Tensor:
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight
