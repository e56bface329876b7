"""The GPTModel subclass of this project, layers for machines without Transformer Engine, and the spec that selects them."""

import copy
import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions import transformer_engine as te_layers
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import LNImpl, get_gpt_decoder_block_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from megatron_rl.models.layers.attention import PackedAttention
from megatron_rl.models.layers.delta_net import with_linear_attention
from megatron_rl.system.gpu import gpu_environment
from megatron_rl.system.megatron_core import mend_layers

SPLIT_GRADIENT_MARK = "sequence_parallel"
"""Attribute of parameters that Megatron checks."""
_FLOAT32_TOKENS = 2048
"""Longest sequence for which float32 attention is cheap; flash attention supports 16-bit types only."""


mend_layers(has_transformer_engine=te_layers.HAVE_TE)


def has_transformer_engine() -> bool:
    """True if there is a GPU and Megatron could import Transformer Engine; models then use its layers."""
    return torch.cuda.is_available() and te_layers.HAVE_TE


_CPU_NOTE = (
    "a model in bfloat16 computes on this CPU, because torch finds no GPU. If the machine has GPUs, check that nvidia-smi lists them "
    "(MEGATRON_RL_REQUIRE_GPU=1 makes their absence an error); if not, set policy.dtype=float32 (and critic.dtype), which is faster here"
)


def layers_note(config: TransformerConfig, longest: int = 0) -> str:
    """Warning about slow layers (no Transformer Engine or float32 on a GPU, bfloat16 on a CPU), for the display; "" if there is no cost.

    ``longest``: tokens of the longest sequence.
    """
    if not torch.cuda.is_available():
        return _CPU_NOTE if config.params_dtype is torch.bfloat16 else ""
    if has_transformer_engine():
        return _float32_note(config, longest)
    slow = ["norms, rotary embeddings and the optimizer in many small kernels"]
    slow += ["experts one at a time"] if config.num_moe_experts else []
    slow += ["latent attention without a fused kernel"] if config.multi_latent_attention else []
    if config.context_parallel_size > 1:
        slow += ["keys and values of whole sequences gathered on every rank, with masks of length x length"]
    problem = gpu_environment.transformer_engine_problem
    why = f"does not load on this GPU ({problem})" if problem else "is missing on this GPU"
    return (
        f"Transformer Engine {why}: layers in plain PyTorch replace it, correct but slow "
        f"({'; '.join(slow)}); install it for anything but a trial (docs/cluster.md)"
    )


def _float32_note(config: TransformerConfig, longest: int) -> str:
    if config.params_dtype is not torch.float32 or longest <= _FLOAT32_TOKENS:
        return ""
    gigabytes = 4 * config.num_attention_heads / config.tensor_model_parallel_size * longest**2 / 1e9
    return (
        f"float32 has no fused attention on this GPU: each layer keeps scores of length x length, {gigabytes:.1f} GB for a "
        f"sequence of {longest:,} tokens; set policy.dtype=bfloat16 (and critic.dtype), or keep sequences below "
        f"{_FLOAT32_TOKENS:,} tokens"
    )


def mark_split_gradients(module: nn.Module, sequence_parallel: bool) -> None:
    """Mark the module's parameters if, under sequence parallelism, their gradients cover only the rank's own tokens.

    Megatron sums the gradients of marked parameters over the tensor-parallel group.
    """
    for parameter in module.parameters():
        setattr(parameter, SPLIT_GRADIENT_MARK, sequence_parallel)


class _CpuRmsNorm(torch.autograd.Function):
    """RMSNorm of rows, y = w * x * r with r = (mean(x^2) + eps)^-1/2, in half of the time of ``F.rms_norm`` on a CPU.

    PyTorch has no fused kernel there and differentiates each operation by itself; GPUs have one. With p = dL/dy * x:
    dL/dw = sum of p * r over rows, dL/dx = r * w * dL/dy - x * r^3 * (p . w) / n.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = rows.shape[-1]
        scale = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_().div_(size).add_(eps).rsqrt_()
        ctx.save_for_backward(rows, weight, scale)
        return (rows * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, scale = ctx.saved_tensors
        size = rows.shape[-1]
        product = (grad * rows).reshape(-1, size)
        along = (product @ weight).view(scale.shape).mul_(scale.pow(3)).div_(-size)
        return (grad * weight).mul_(scale).addcmul_(rows, along), scale.reshape(-1) @ product, None


class _LocalNorm(nn.Module):
    """RMSNorm or LayerNorm in plain PyTorch; its parameters are marked for sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.shape, self.eps, self.kind = (hidden_size,), eps, config.normalization
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.zeros(hidden_size) if self.zero_centered else torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if self.kind == "LayerNorm" else None
        mark_split_gradients(self, config.sequence_parallel)

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self.weight
        if self.zero_centered:
            # In float32 at least: near 1, bfloat16 would round small weights away.
            wide = torch.promote_types(weight.dtype, torch.float32)
            return self._normed(hidden.to(wide), weight.to(wide) + 1).to(hidden.dtype)
        return self._normed(hidden, weight)

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        if self.kind == "RMSNorm":
            if hidden.device.type == "cpu" and hidden.dtype is weight.dtype and hidden.dtype in (torch.float32, torch.float64):
                normed: Tensor = _CpuRmsNorm.apply(hidden, weight, self.eps)
                return normed
            return F.rms_norm(hidden, self.shape, weight, self.eps)
        return F.layer_norm(hidden, self.shape, weight, self.bias, self.eps)


class _ReplicatedLinear(nn.Linear):
    """A linear layer without bias, replicated on all tensor-parallel ranks, with the interface of Megatron's layers."""

    def __init__(self, in_features: int, out_features: int, config: TransformerConfig) -> None:
        super().__init__(in_features, out_features, bias=False, dtype=config.params_dtype)
        mark_split_gradients(self, config.sequence_parallel)

    def forward(  # type: ignore[override]  # Megatron expects a bias, or None, next to the result
        self, hidden: Tensor
    ) -> tuple[Tensor, None]:
        return super().forward(hidden), None


class _LatentAttention(MLASelfAttention):
    """Megatron's latent attention with replicated projections to the latents, as in Transformer Engine.

    Megatron's own layers split these projections over the ranks; the shared rotary key would then get the gradient
    of one rank's heads only. With more than one rank, sequence parallelism is required for the same reason.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = _ReplicatedLinear(config.hidden_size, config.q_lora_rank, config)
        latent_size = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = _ReplicatedLinear(config.hidden_size, latent_size, config)


_LOCAL_LAYERS: dict[type, type] = {
    DotProductAttention: PackedAttention,
    WrappedTorchNorm: _LocalNorm,
    LNImpl: _LocalNorm,
    MLASelfAttention: _LatentAttention,
}
"""Replacements of Megatron's layers that need a GPU or do not support packs (LNImpl is Apex's layer if installed)."""


def block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage (of its chunk ``vp_stage``): Transformer Engine's if available, else this module's."""
    on_gpu, softmax = has_transformer_engine(), copy.copy(config)
    softmax.experimental_attention_variant = None  # which Megatron has for Transformer Engine only
    spec = get_gpt_decoder_block_spec(
        softmax, use_transformer_engine=on_gpu, normalization=config.normalization, vp_stage=vp_stage
    )
    if config.experimental_attention_variant:
        first = get_transformer_layer_offset(config, vp_stage)
        linear = config.linear_attention_freq[first : first + len(spec.layer_specs)]
        spec = dataclasses.replace(spec, layer_specs=with_linear_attention(spec.layer_specs, linear, config, on_gpu=on_gpu))
    if on_gpu:
        return spec
    return swap_layers(spec, _LOCAL_LAYERS)


def restore_float32(model: nn.Module) -> None:
    """Cast the routers' expert biases back to float32 after a cast of the model."""
    for module in model.modules():
        if isinstance(module, TopKRouter) and module.expert_bias is not None:
            module.expert_bias = module.expert_bias.float()


def swap_layers(spec: Any, table: dict[type, type]) -> Any:
    """``spec`` with the classes in ``table`` replaced, anywhere in the tree of module specs."""
    # A spec is a tree of classes, ModuleSpecs, partial calls, dataclasses and lists; any other value is an option and stays unchanged.
    if isinstance(spec, type):
        return table.get(spec, spec)
    if isinstance(spec, ModuleSpec):
        return dataclasses.replace(
            spec, module=swap_layers(spec.module, table), submodules=swap_layers(spec.submodules, table)
        )
    if isinstance(spec, functools.partial):  # since Megatron Core 0.19, for what follows attention
        arguments = {name: swap_layers(value, table) for name, value in spec.keywords.items()}
        return functools.partial(swap_layers(spec.func, table), *spec.args, **arguments)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        fields = {f.name: swap_layers(getattr(spec, f.name), table) for f in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **fields)
    if isinstance(spec, list):
        return [swap_layers(item, table) for item in spec]
    return spec


class PackedGPTModel(GPTModel):
    """A GPTModel whose last stage returns the input of ``policy.token_logprobs`` or ``critic.token_values``."""

    real_vocab_size: int
    """Vocabulary size of the model; the output layer may be padded beyond it."""
    fp32_head: bool = False
    """True keeps the gradients of the logits in float32 even in a bfloat16 model; the logits always are float32."""
    excluded_token_ids: tuple[int, ...]
    """Ids of images, which no response contains and which have probability 0 (policy only)."""


def unwrap(chunk: nn.Module) -> PackedGPTModel:
    """The model inside Megatron's wrappers (distributed data parallel)."""
    inner: Any = chunk
    while not isinstance(inner, PackedGPTModel):
        inner = inner.module
    return inner
