"""Numbers of parameters by how a layout spreads them, from the family's table. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from megatron_rl.families.family import ModelConfig, Rule, family_of
from megatron_rl.families.model_facts import cached_by_content, dims, has_experts
from megatron_rl.families.transforms import Replicated, padded_vocab_size
from megatron_rl.families.vision_encoder import ADAPTER, parameter_shapes
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops


@dataclass(frozen=True)
class ParameterCount:
    """Of a layer, or of several."""

    split: int = 0
    """Spread over the tensor-parallel group."""
    replicated: int = 0
    """Whole on every rank: norms, routers."""
    experts: int = 0
    """All experts', spread over the expert-parallel and the expert-tensor-parallel group."""
    biases: int = 0
    """The routers' expert biases: in the files, but no parameters of Megatron's (float32 buffers, no gradient)."""

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
    """Of each decoder layer. A family's layers differ in whether they have experts alone, so each kind is counted once."""
    kinds = has_experts(config)
    counted = {kind: _of_rules(config, family_of(config).layer(config, kinds.index(kind))) for kind in set(kinds)}
    return [counted[kind] for kind in kinds]


def _of_rules(config: ModelConfig, rules: Iterable[Rule]) -> ParameterCount:
    sizes, kinds = dims(config), {"split": 0, "replicated": 0, "experts": 0, "biases": 0}
    for rule in rules:
        number = sum(math.prod(sizes[name] for name in shape) for shape in rule.hf.values())
        # A stacked tensor holds all experts already.
        if "{expert}" in rule.megatron:
            kinds["experts"] += number * (1 if rule.is_stacked else sizes["experts"])
        elif rule.megatron.endswith(".expert_bias"):
            kinds["biases"] += number
        else:
            kinds["replicated" if isinstance(rule.transform, Replicated) else "split"] += number
    return ParameterCount(**kinds)


def embedding_parameters(config: ModelConfig, *, tensor_parallel_size: int = 1) -> ParameterCount:
    """Before the first layer: the embedding, padded to a multiple of the ranks, and the encoder of a model that sees."""
    vocab = padded_vocab_size(dims(config)["vocab"], tensor_parallel_size)
    return ParameterCount(split=vocab * dims(config)["hidden"], replicated=sum(encoder_parameters(config)))


@cached_by_content
def encoder_parameters(config: ModelConfig) -> tuple[int, int]:
    """(of the vision tower, of its adapter); none in a model that sees nothing."""
    if family_of(config).vision is None:
        return 0, 0
    sizes = {name: math.prod(shape) for name, shape in parameter_shapes(_encoder_config(config)).items()}
    adapter = sum(size for name, size in sizes.items() if name.startswith(ADAPTER))
    return sum(sizes.values()) - adapter, adapter


def _encoder_config(config: ModelConfig) -> ModelConfig:
    """As transformers reads it, whose encoder is asked for its parameters, also where ``config`` is the file itself."""
    if not isinstance(config.vision_config, dict):
        return config.vision_config
    declare_torchvision_ops()
    from transformers import AutoConfig

    return AutoConfig.for_model(config.model_type, vision_config=config.vision_config).vision_config


def head_parameters(config: ModelConfig, *, is_critic: bool = False, tensor_parallel_size: int = 1) -> ParameterCount:
    """After the last layer: the norm and the output layer (padded likewise), also where it is tied to the embedding."""
    hidden = dims(config)["hidden"]
    if is_critic:
        return ParameterCount(replicated=2 * hidden)
    return ParameterCount(split=padded_vocab_size(dims(config)["vocab"], tensor_parallel_size) * hidden, replicated=hidden)


@cached_by_content
def num_parameters(config: ModelConfig) -> int:
    """Of the whole policy, as its files count them."""
    tied = embedding_parameters(config).split if config.tie_word_embeddings else 0
    layers = ParameterCount.sum(layer_parameters(config)).number
    return layers + embedding_parameters(config).number + head_parameters(config).number - tied
