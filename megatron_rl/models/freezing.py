"""Excludes parameters from training, before Megatron allocates gradients and optimizer state for the others."""

from collections.abc import Sequence

from torch import Tensor, nn
from transformers import PretrainedConfig

from megatron_rl.families.parameters import Role, frozen_parameters
from megatron_rl.models.hf.gather import named_parameters
from megatron_rl.models.layers.torch_layers import unwrap


def freeze_matching(chunks: Sequence[nn.Module], hf_config: PretrainedConfig, role: Role, patterns: Sequence[str]) -> None:
    """Disable the gradients of ``families.parameters.frozen_parameters``. Called before the chunks are wrapped.

    Raises ModelError as that function.
    """
    if not patterns:
        return
    frozen = frozen_parameters(hf_config, role, patterns)
    for name, parameter in named_parameters(chunks):
        if name in frozen:
            parameter.requires_grad_(False)
    pass_gradients_through(chunks)


def pass_gradients_through(chunks: Sequence[nn.Module]) -> None:
    """Let frozen embeddings give their output a gradient: without one a recomputed layer gets no gradients."""
    for chunk in chunks:
        model = unwrap(chunk)
        embedding = model.embedding.word_embeddings if model.pre_process else None
        if embedding is not None and not embedding.weight.requires_grad and model.config.recompute_granularity:
            embedding.register_forward_hook(_with_gradient)


def _with_gradient(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.requires_grad_()
