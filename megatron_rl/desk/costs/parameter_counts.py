"""Parameter counts of a model, grouped by how a layout shards them. Taken from the family's table. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from megatron_rl.families.adapters import adapted_linears
from megatron_rl.families.family import ModelConfig, Rule, family_of
from megatron_rl.families.model_facts import cached_by_content, dims, layer_kinds, text_config
from megatron_rl.families.transforms import Replicated, RowParallel, padded_vocab_size
from megatron_rl.families.vision_encoder import ADAPTER, parameter_shapes
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops


@dataclass(frozen=True)
class ParameterCount:
    """Parameter counts of one or several layers."""

    split: int = 0
    """Sharded over the tensor-parallel group."""
    replicated: int = 0
    """Stored in full on every rank: norms, routers."""
    experts: int = 0
    """Parameters of all experts, sharded over the expert-parallel and the expert-tensor-parallel group."""
    biases: int = 0
    """The routers' expert biases: stored in the checkpoint, but float32 buffers without gradient in Megatron."""

    @property
    def number(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def times(self, number: int) -> "ParameterCount":
        return ParameterCount(self.split * number, self.replicated * number, self.experts * number, self.biases * number)

    @classmethod
    def sum(cls, parts: Iterable["ParameterCount"]) -> "ParameterCount":
        listed = list(parts)
        return cls(*(sum(getattr(part, field.name) for part in listed) for field in fields(cls)))


@cached_by_content
def layer_parameters(config: ModelConfig) -> list[ParameterCount]:
    """Parameters of each decoder layer; each kind is counted once."""
    kinds = layer_kinds(config)
    counted = {kind: _of_rules(config, family_of(config).layer(config, kinds.index(kind))) for kind in set(kinds)}
    return [counted[kind] for kind in kinds]


def _of_rules(config: ModelConfig, rules: Iterable[Rule]) -> ParameterCount:
    sizes, kinds = dims(config), {"split": 0, "replicated": 0, "experts": 0, "biases": 0}
    for rule in rules:
        number = sum(math.prod(sizes[name] for name in shape) for shape in rule.hf.values())
        # A stacked tensor contains all experts already.
        if "{expert}" in rule.megatron:
            kinds["experts"] += number * (1 if rule.is_stacked else sizes["experts"])
        elif rule.megatron.endswith(".expert_bias"):
            kinds["biases"] += number
        else:
            kinds["replicated" if isinstance(rule.transform, Replicated) else "split"] += number
    return ParameterCount(**kinds)


@cached_by_content
def adapter_parameters(config: ModelConfig, targets: Sequence[str], rank: int) -> list[ParameterCount]:
    """Parameters of the adapters of each decoder layer."""
    by_layer = [[ParameterCount()] for _ in range(text_config(config).num_hidden_layers)]
    for linear in adapted_linears(config, targets, rank):
        a, b = (sum(math.prod(shape) for shape in entry.hf.values()) for entry in (linear.a, linear.b))
        by_input = isinstance(linear.base.transform, RowParallel)
        if linear.is_expert:
            count = ParameterCount(experts=a + b)
        elif not linear.base.transform.is_split:
            count = ParameterCount(replicated=a + b)
        else:
            count = ParameterCount(split=a if by_input else b, replicated=b if by_input else a)
        by_layer[int(linear.base.megatron.split(".")[2])].append(count)
    return [ParameterCount.sum(counts) for counts in by_layer]


def embedding_parameters(config: ModelConfig, *, tensor_parallel_size: int = 1) -> ParameterCount:
    """Parameters before the first layer: the embedding, padded to a multiple of the ranks, and a vision model's encoder."""
    vocab = padded_vocab_size(dims(config)["vocab"], tensor_parallel_size)
    return ParameterCount(split=vocab * dims(config)["hidden"], replicated=sum(encoder_parameters(config)))


@cached_by_content
def encoder_parameters(config: ModelConfig) -> tuple[int, int]:
    """Parameters of (the vision tower, its adapter); (0, 0) for a model without vision."""
    if family_of(config).vision is None:
        return 0, 0
    sizes = {name: math.prod(shape) for name, shape in parameter_shapes(_encoder_config(config)).items()}
    adapter = sum(size for name, size in sizes.items() if name.startswith(ADAPTER))
    return sum(sizes.values()) - adapter, adapter


def _encoder_config(config: ModelConfig) -> ModelConfig:
    """The encoder's config as transformers parses it, also if ``config`` is the parsed JSON file."""
    if not isinstance(config.vision_config, dict):
        return config.vision_config
    declare_torchvision_ops()
    from transformers import AutoConfig

    return AutoConfig.for_model(config.model_type, vision_config=config.vision_config).vision_config


def head_parameters(config: ModelConfig, *, is_critic: bool = False, tensor_parallel_size: int = 1) -> ParameterCount:
    """Parameters after the last layer: the norm and the output layer, padded like the embedding and counted even if tied to it."""
    hidden = dims(config)["hidden"]
    if is_critic:
        return ParameterCount(replicated=2 * hidden)
    return ParameterCount(split=padded_vocab_size(dims(config)["vocab"], tensor_parallel_size) * hidden, replicated=hidden)


@cached_by_content
def num_parameters(config: ModelConfig) -> int:
    """Parameters of the whole policy as its checkpoint files count them: a tied output layer counts once."""
    tied = embedding_parameters(config).split if config.tie_word_embeddings else 0
    layers = ParameterCount.sum(layer_parameters(config)).number
    return layers + embedding_parameters(config).number + head_parameters(config).number - tied
