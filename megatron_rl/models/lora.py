"""Low-rank adapters (LoRA) of Megatron's linear layers, in every parallel layout.

An adapter follows the split of its layer. If the layer splits its output features, A is whole on every rank and B is
split like the weight; if it splits its input features, A is split and B is whole. Only ``rank`` features per token
cross the tensor-parallel group. So a rank's own parts of A and B give its own part of the merged weight, and merging
needs no communication.

An adapter's parameters depend on seed and name only, and their names are those of the whole model, so weights,
updates and checkpoints do not depend on the layout. The base model's weights are frozen; a critic's value head trains.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name, model_parallel_cuda_manual_seed
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor, nn
from transformers import PretrainedConfig

from megatron_rl.config.schema import LoraConfig
from megatron_rl.families.adapters import AdaptedLinear, adapted_linears
from megatron_rl.families.model_facts import dims
from megatron_rl.families.parameters import Entry, Role
from megatron_rl.families.transforms import QKV, Dims, GatedMLP, RowParallel
from megatron_rl.models.freezing import pass_gradients_through
from megatron_rl.models.hf.adapter_folder import read_adapter
from megatron_rl.models.hf.gather import adapter_parameters, named_parameters, names_in_model
from megatron_rl.models.hf.weights import fill_parameters
from megatron_rl.models.layers.torch_layers import SPLIT_GRADIENT_MARK, unwrap

FIXED_FIELDS = {"moe_shared_expert_overlap": False}
"""Fields of TransformerConfig: overlapped shared experts exchange tokens outside their layers, which adapters would not see."""
_EXCHANGES: dict[tuple[bool, bool], Callable[[Tensor], Tensor]] = {
    (True, True): reduce_scatter_to_sequence_parallel_region,
    (True, False): reduce_from_tensor_model_parallel_region,
    (False, True): gather_from_sequence_parallel_region,
    (False, False): copy_to_tensor_model_parallel_region,
}
"""(input features are split, sequence parallelism) -> exchange of the features between A and B over the tensor-parallel group."""


def scale_of(lora: LoraConfig) -> float:
    """The factor of the adapters' outputs."""
    return lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)


def merged_weight(weight: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], scale: float) -> Tensor:
    """``weight`` [out, in] plus ``scale`` times B A of its modules, computed in at least float32.

    Each A is [rank, in], and each B [rows, rank], or [groups, rows, rank] if every group of rows has the modules' rows in turn.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    products = [up.to(wide) @ down.to(wide) for down, up in zip(a, b, strict=True)]
    return (weight.to(wide) + torch.cat(products, -2).reshape(weight.shape) * scale).to(weight.dtype)


class Adapter(nn.Module):
    """The adapter of one linear layer on this rank."""

    def __init__(
        self, linear: AdaptedLinear, weight: Tensor, lora: LoraConfig, sizes: Dims, *, sequence_parallel: bool
    ) -> None:
        """``weight`` [out, in]: this rank's part of the layer's weight."""
        super().__init__()
        self.linear, self.scale, self.dropout = linear, scale_of(lora), lora.dropout
        self.is_on = True
        out, num_modules = weight.shape[0], len(linear.base.hf)
        self.by_input = isinstance(linear.base.transform, RowParallel)
        """True if the tensor-parallel ranks split the layer's input features."""
        # The experts' dispatcher exchanges tokens, and every rank has whole experts (``lora_problems``).
        is_split = linear.base.transform.is_split and not linear.is_expert
        self.exchanges = is_split and parallel_state.get_tensor_model_parallel_world_size() > 1
        self.sequence_parallel = sequence_parallel and not linear.is_expert
        self.num_groups, self.rows = 1, (out // num_modules,) * num_modules
        """Rows of the weight: groups, and in each the rows of the modules in turn."""
        if isinstance(linear.base.transform, QKV):
            per_group = sizes["q"] // sizes["groups"], sizes["kv"] // sizes["groups"], sizes["kv"] // sizes["groups"]
            self.num_groups, self.rows = out // sum(per_group), per_group
        self.A = nn.Parameter(weight.new_zeros(num_modules * lora.rank, weight.shape[1]))
        self.B = nn.Parameter(weight.new_zeros(out, lora.rank))
        for parameter, is_own in ((self.A, self.by_input), (self.B, not self.by_input)):
            vars(parameter)["allreduce"] = getattr(
                weight, "allreduce", True
            )  # False: expert-parallel, for Megatron's DDP
            # The gradient norm counts an unmarked parameter on the first tensor-parallel rank only.
            if linear.is_expert or (is_split and is_own):
                set_tensor_model_parallel_attributes(
                    parameter, is_parallel=True, dim=1 if self.by_input else 0, stride=1
                )
            elif self.sequence_parallel:
                setattr(parameter, SPLIT_GRADIENT_MARK, True)

    def forward(self, hidden: Tensor, base: Tensor) -> Tensor:
        """``base`` [T, .., out], the layer's own output for ``hidden`` [T, .., in], plus the adapter's."""
        low = F.linear(self._dropped(hidden), self.A)
        if self.exchanges:
            low = _EXCHANGES[self.by_input, self.sequence_parallel](low)
        # One product for all modules, because its passes over [T, out] cost more than its zeros.
        low = (low * self.scale).flatten(0, -2)
        return torch.addmm(base.flatten(0, -2), low, self._wide_b().t()).view(base.shape)

    def _wide_b(self) -> Tensor:
        """[out, modules x rank]: each module's B in the module's rows and columns, 0 elsewhere and without an adapter."""
        rank, num = self.B.shape[1], len(self.rows)
        # Without an adapter A and B get no gradient, so B stays 0.
        parts = (
            F.pad(b, (index * rank, (num - 1 - index) * rank)) if is_adapted else b.new_zeros(*b.shape[:-1], num * rank)
            for index, (is_adapted, b) in enumerate(zip(self.linear.is_adapted, self._parts_of_b(), strict=True))
        )
        return torch.cat(list(parts), 1).flatten(0, 1)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """This rank's part of the layer's weight, ``weight``, plus the adapter's."""
        return merged_weight(weight, self.A.split(self.B.shape[1]), self._parts_of_b(), self.scale)

    def _parts_of_b(self) -> tuple[Tensor, ...]:
        """B of each module, [groups, rows, rank]."""
        return self.B.unflatten(0, (self.num_groups, -1)).split(self.rows, 1)

    def _dropped(self, hidden: Tensor) -> Tensor:
        if not self.training or not self.dropout:
            return hidden
        if self.linear.is_expert:
            generator = get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name())
        elif self.exchanges and (self.by_input or self.sequence_parallel):
            generator = get_cuda_rng_tracker().fork()
        else:  # the tensor-parallel ranks have the same input
            return F.dropout(hidden, self.dropout)
        with generator:
            return F.dropout(hidden, self.dropout)


def add_adapters(
    chunks: Sequence[nn.Module], hf_config: PretrainedConfig, role: Role, lora: LoraConfig, *, seed: int
) -> None:
    """Give the chunks' layers their adapters, initialized as peft does or loaded from ``lora.path``, and freeze the rest.

    Called once the weights are loaded, before the chunks are wrapped. Raises ModelError for targets without a match.
    """
    sizes = dims(hf_config)
    linears = adapted_linears(hf_config, lora.targets, lora.rank)
    by_weight = {linear.base.megatron: linear for linear in linears}
    for chunk in chunks:
        model = unwrap(chunk)
        model.requires_grad_(False)
        if role == "critic" and model.post_process:
            model.output_layer.requires_grad_(True)
        name_of = names_in_model(model)
        for name, module in list(model.named_modules()):
            own = dict(module.named_parameters(recurse=False))
            found = {key: by_weight.get(name_of(f"{name}.{key}")) for key in own}
            adapters = [
                Adapter(linear, own[key], lora, sizes, sequence_parallel=model.config.sequence_parallel)
                for key, linear in found.items()
                if linear is not None
            ]
            if not adapters:
                continue
            is_grouped = "weight" not in found
            module.lora = nn.ModuleList(adapters) if is_grouped else adapters[0]
            module.register_forward_hook(_add_grouped if is_grouped else _add)
    pass_gradients_through(chunks)
    table = {entry.megatron: entry for entry in adapter_table(hf_config, lora)}
    source = AdapterFolder(lora.path, hf_config, lora) if lora.path else FreshAdapters(seed)
    fill_parameters(adapter_parameters(chunks), table, hf_config, source)


def share_weights(chunks: Sequence[nn.Module], base: Sequence[nn.Module]) -> None:
    """Make the weights of a critic's ``chunks``, except its head, those of a policy's, in the same memory. Both must be frozen."""
    shared = dict(named_parameters(base))
    for name, parameter in named_parameters(chunks):
        if not name.startswith("output_layer."):
            parameter.data = shared[name].data


def _add(
    module: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Hook of a linear layer, whose output is (result, bias that is still to be added)."""
    if not module.lora.is_on:
        return output
    return module.lora(_normalized(module, inputs[0]), output[0]), output[1]


def _add_grouped(
    module: Any, inputs: tuple[Tensor, list[int]], output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Hook of a layer of several experts, whose inputs are (rows sorted by expert, number of rows of each)."""
    if not module.lora[0].is_on:
        return output
    rows, base = (values.split(list(inputs[1])) for values in (inputs[0], output[0]))
    return torch.cat([adapter(*own) for adapter, *own in zip(module.lora, rows, base, strict=True)]), output[1]


def _normalized(module: Any, hidden: Tensor) -> Tensor:
    """The input of the layer's product: Transformer Engine fuses a norm into some layers."""
    weight = getattr(module, "layer_norm_weight", None)
    if weight is None:
        return hidden
    if module.zero_centered_gamma:
        weight = weight + 1
    if module.normalization == "RMSNorm":
        return F.rms_norm(hidden, weight.shape, weight, module.eps)
    return F.layer_norm(hidden, weight.shape, weight, module.layer_norm_bias, module.eps)


def seed_dropout(seed: int, step: int, data_rank: int) -> None:
    """Seed Megatron's random generators for the dropout of one update."""
    model_parallel_cuda_manual_seed(seed * 1_000_003 + step * 1009 + data_rank, force_reset_rng=True)


@contextmanager
def without_adapters(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Run the chunks as the base model inside the block."""
    adapters = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapter)]
    for adapter in adapters:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_on = True


class MergedParameters(Mapping[str, Tensor]):
    """``named_parameters`` with the adapters merged, one parameter at a time as it is read."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._base = dict(named_parameters(chunks))
        modules = (module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapter))
        self._adapters = {adapter.linear.base.megatron: adapter for adapter in modules}

    def __getitem__(self, name: str) -> Tensor:
        base, adapter = self._base[name], self._adapters.get(name)
        return base if adapter is None else adapter.merged(base)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


@dataclass(frozen=True)
class FreshAdapters:
    """Adapters as peft initializes them: A uniform (Kaiming), B 0. A tensor depends on ``seed`` and its name alone."""

    seed: int

    def read(self, name: str, shape: tuple[int, ...], part: int | None = None) -> Tensor:
        if name.endswith("lora_B.weight"):
            return torch.zeros(shape)
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        bound = 1 / math.sqrt(shape[1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)


class AdapterFolder:
    """The adapters in a folder of peft; modules without an adapter have zeros."""

    def __init__(self, folder: str, hf_config: PretrainedConfig, lora: LoraConfig) -> None:
        """Raises WeightsError."""
        self._tensors = read_adapter(folder, hf_config, lora)

    def read(self, name: str, shape: tuple[int, ...], part: int | None = None) -> Tensor:
        return self._tensors.get(name, torch.zeros(shape))


def adapter_table(hf_config: PretrainedConfig, lora: LoraConfig) -> list[Entry]:
    """The parameters of all adapters of the whole model."""
    return [entry for linear in adapted_linears(hf_config, lora.targets, lora.rank) for entry in (linear.a, linear.b)]


def sharded_adapters(chunk: nn.Module) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """Sharded state of the chunk's adapters by the parameters' names in the chunk; in files by their names in the tables."""
    tp_rank, tp_size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    state: dict[str, ShardedTensor | ShardedTensorFactory] = {}
    for prefix, adapter in unwrap(chunk).named_modules():
        if not isinstance(adapter, Adapter):
            continue
        is_split = adapter.linear.base.transform.is_split and not adapter.linear.is_expert
        data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        if adapter.linear.is_expert:
            data_rank = parallel_state.get_expert_data_parallel_rank()
        for name, entry, axis in (("A", adapter.linear.a, 1), ("B", adapter.linear.b, 0)):
            here = is_split and adapter.by_input == (axis == 1)
            copy = 0 if here or adapter.linear.is_expert else tp_rank
            offsets = [(axis, tp_rank, tp_size)] if here else []
            sharded = ShardedTensor.from_rank_offsets(
                entry.megatron, getattr(adapter, name), *offsets, replica_id=(0, copy, data_rank)
            )
            is_gated = name == "B" and isinstance(adapter.linear.base.transform, GatedMLP)
            state[f"{prefix}.{name}"] = apply_swiglu_sharded_factory(sharded, ()) if is_gated else sharded
    return state
