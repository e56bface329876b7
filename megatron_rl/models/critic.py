"""The critic: the policy's architecture with a value head instead of the language-model head.

The head is one row, replicated on the tensor-parallel ranks. It is part of the model, so ``forward``
(``packed_gpt.py``) returns values on the last stage. The model's value at position t is computed after token t;
``token_values`` shifts the values to the alignment of ``data/batch.py``, where values[t] is V(s_t), the value
before token t.
"""

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from transformers import PretrainedConfig

from megatron_rl.config.schema import ParallelConfig, Recompute
from megatron_rl.data.batch import PackedBatch, moved, reply_spans
from megatron_rl.families.family import family_of
from megatron_rl.families.model_facts import text_config
from megatron_rl.families.parameters import VALUE_HEAD
from megatron_rl.models.hf.tensor_sources import RandomSource
from megatron_rl.models.hf.weights import fill
from megatron_rl.models.layers.context import rows_of_tokens, sum_over_context
from megatron_rl.models.layers.torch_layers import mark_split_gradients
from megatron_rl.models.megatron_fields import PLAIN, MegatronSettings
from megatron_rl.models.packed_gpt import PackedGPTModel, build_chunks, forward, sequence_starts, unwrap

__all__ = ["ValueHead", "build_critic", "final_values", "forward", "token_values"]

_DEFAULT_HEAD_SEED = 0


class ValueHead(nn.Module):
    """Value head with the interface of Megatron's output layer: hidden [T, 1, H] -> values [T, 1, 1] in float32."""

    def __init__(self, config: TransformerConfig, initial_weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(initial_weight.to(config.params_dtype))
        self.sequence_parallel = config.sequence_parallel
        mark_split_gradients(self, config.sequence_parallel)

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        # float32 for every model dtype, because values are regressed and bfloat16 has three significant digits.
        values = F.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # All ranks continue with the same values, so backward takes the rank's slice instead of a sum.
            values = tensor_parallel.gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def build_critic(
    hf_config: PretrainedConfig,
    parallel: ParallelConfig,
    *,
    dtype: torch.dtype,
    recompute: Recompute = Recompute.none,
    settings: MegatronSettings = PLAIN,
    seed: int | None,
) -> list[PackedGPTModel]:
    """This rank's part of the critic; arguments, weights and errors as in ``policy.build_policy``.

    The value head is always initialized (normal with ``initializer_range``), even if ``seed`` is None, because a
    policy's checkpoint has no value head to load.
    """
    chunks = build_chunks(
        hf_config, parallel, dtype=dtype, recompute=recompute, share_embeddings=False, settings=settings
    )
    text = text_config(hf_config)
    # From seed and name, not from torch's generator, so that every layout starts from the same head.
    head_seed = _DEFAULT_HEAD_SEED if seed is None else seed
    initial = RandomSource(head_seed, text.initializer_range).read(VALUE_HEAD, (1, text.hidden_size))
    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer = ValueHead(chunk.config, initial.to(chunk.output_layer.weight.device))
    if seed is not None:
        fill(chunks, hf_config, RandomSource(seed, text.initializer_range, family_of(hf_config).fresh), role="critic")
    return chunks


def read_outputs(batch: PackedBatch) -> Tensor | None:
    """[T] bool: the tokens whose outputs are values of the batch's spans, of tokens that train, or of a whole sequence; None: all."""
    if batch.spans is None:
        return None
    read = torch.zeros(len(batch.tokens), dtype=torch.bool)
    if "mask" in batch.fields:
        read[:-1] = batch.fields["mask"][1:] != 0
    read[batch.cu_seqlens[1:] - 1] = True
    for first, end in zip(*reply_spans(batch), strict=True):
        read[max(first - 1, 0) : end] = True
    return read


def token_values(chunk: nn.Module, output: Tensor, batch: PackedBatch) -> Tensor:
    """Values [T] float32: entry t is V(s_t), the value before token t; 0 at sequence starts. Differentiable."""
    after = _values_after_tokens(chunk, output, batch)
    is_start = torch.zeros(len(after), dtype=torch.bool)
    is_start[sequence_starts(batch)] = True
    return F.pad(after[:-1], (1, 0)).masked_fill(moved(is_start, after.device), 0.0)


def final_values(chunk: nn.Module, output: Tensor, batch: PackedBatch) -> Tensor:
    """[N] float32: the value after the last token of each sequence (0 for an empty sequence). Differentiable."""
    after = _values_after_tokens(chunk, output, batch)
    # An empty sequence has no last token: an arbitrary row is read, then masked.
    last, is_empty = (batch.cu_seqlens[1:] - 1).clamp(min=0), batch.lengths == 0
    return after[moved(last, after.device)].masked_fill(moved(is_empty, after.device), 0.0)


def _values_after_tokens(chunk: nn.Module, output: Tensor, batch: PackedBatch) -> Tensor:
    """Values after each token, [T], from ``output`` [1, T', 1] with padding (this rank's part under context parallelism)."""
    config = unwrap(chunk).config
    rows = rows_of_tokens(batch.lengths.tolist(), config)
    if rows is None:
        return output[0, : len(batch.tokens), 0]
    local = (rows >= 0).nonzero()[:, 0]
    here, own_rows = moved(local, output.device), moved(rows[local], output.device)
    values = output.new_zeros(len(rows)).index_put((here,), output[0, own_rows, 0])
    return sum_over_context(values, config)
