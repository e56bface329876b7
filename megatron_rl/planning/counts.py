"""Numbers of parameters by how a layout spreads them, from the family's table. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_rl.cpu.torchvision import declare_torchvision_ops
from megatron_rl.families.facts import dims, has_experts
from megatron_rl.families.family import ModelConfig, Rule, family_of
from megatron_rl.families.transforms import Replicated
from megatron_rl.families.vision_encoder import parameter_shapes


@dataclass(frozen=True)
class Parameters:
    """Of a layer, or of several."""

    split: int = 0
    """Spread over the tensor-parallel group."""
    replicated: int = 0
    """Whole on every rank: norms, routers."""
    experts: int = 0
    """All experts', spread over the expert-parallel and the expert-tensor-parallel group."""

    @property
    def number(self) -> int:
        return self.split + self.replicated + self.experts

    @classmethod
    def sum(cls, parts: Iterable["Parameters"]) -> "Parameters":
        listed = list(parts)
        return cls(*(sum(getattr(part, kind) for part in listed) for kind in ("split", "replicated", "experts")))


def layer_parameters(config: ModelConfig) -> list[Parameters]:
    """Of each decoder layer. A family's layers differ in whether they have experts alone, so each kind is counted once."""
    kinds = has_experts(config)
    counted = {kind: _of_rules(config, family_of(config).layer(config, kinds.index(kind))) for kind in set(kinds)}
    return [counted[kind] for kind in kinds]


def _of_rules(config: ModelConfig, rules: Iterable[Rule]) -> Parameters:
    sizes, kinds = dims(config), {"split": 0, "replicated": 0, "experts": 0}
    for rule in rules:
        number = sum(math.prod(sizes[name] for name in shape) for shape in rule.hf.values())
        # A stacked tensor holds all experts already.
        if "{expert}" in rule.megatron:
            kinds["experts"] += number * (1 if rule.is_stacked else sizes["experts"])
        else:
            kinds["replicated" if isinstance(rule.transform, Replicated) else "split"] += number
    return Parameters(**kinds)


def embedding_parameters(config: ModelConfig) -> Parameters:
    """Before the first layer: the embedding and, of a model that sees, its encoder."""
    sizes = dims(config)
    encoder = parameter_shapes(_encoder_config(config)).values() if family_of(config).vision is not None else ()
    return Parameters(split=sizes["vocab"] * sizes["hidden"], replicated=sum(map(math.prod, encoder)))


def _encoder_config(config: ModelConfig) -> ModelConfig:
    """As transformers reads it, whose encoder is asked for its parameters, also where ``config`` is the file itself."""
    if not isinstance(config.vision_config, dict):
        return config.vision_config
    declare_torchvision_ops()
    from transformers import AutoConfig

    return AutoConfig.for_model(config.model_type, vision_config=config.vision_config).vision_config


def head_parameters(config: ModelConfig, *, is_critic: bool = False) -> Parameters:
    """After the last layer: the norm and the output layer, also where it is tied to the embedding."""
    hidden = dims(config)["hidden"]
    if is_critic:
        return Parameters(replicated=2 * hidden)
    return Parameters(split=dims(config)["vocab"] * hidden, replicated=hidden)


def num_parameters(config: ModelConfig) -> int:
    """Of the whole policy, as its files count them."""
    tied = embedding_parameters(config).split if config.tie_word_embeddings else 0
    layers = Parameters.sum(layer_parameters(config)).number
    return layers + embedding_parameters(config).number + head_parameters(config).number - tied
