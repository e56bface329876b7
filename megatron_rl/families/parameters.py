"""Lists every parameter of a model: Megatron's name, the Hugging Face tensors with their shapes, and the transform."""

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from megatron_rl.errors import ModelError
from megatron_rl.families.family import ModelConfig, Rule, family_of
from megatron_rl.families.model_facts import dims, text_config
from megatron_rl.families.transforms import Dims, Replicated, Transform, VocabParallel
from megatron_rl.families.vision_encoder import parameter_shapes

Role = Literal["policy", "critic"]
VALUE_HEAD = "value_head.weight"
"""Name of the critic's value head in files; in Megatron it replaces ``output_layer.weight``."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of a full tensor."""

    name: str
    """The tensor's name in Hugging Face files."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Entry:
    """A rule for one parameter of the whole model, with all indices and sizes filled in."""

    megatron: str
    hf: dict[str, tuple[int, ...]]
    """Maps the names of full tensors to their shapes."""
    transform: Transform
    part: tuple[int, int] | None = None
    """(index, count) if the parameter is one slice of its tensors along their first dimension; None if it is the whole.

    Slices of one tensor are adjacent."""

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the transform's inputs: the full tensors, or one slice of each along the first dimension if ``part`` is set."""
        return [shape if self.part is None else shape[1:] for shape in self.hf.values()]


_EMBEDDING = Rule("embedding.word_embeddings.weight", {"embed_tokens.weight": ("vocab", "hidden")}, VocabParallel())
_FINAL_NORM = Rule("decoder.final_layernorm.weight", {"norm.weight": ("hidden",)}, Replicated())
_LM_HEAD = Rule("output_layer.weight", {"lm_head.weight": ("vocab", "hidden")}, VocabParallel())
_VALUE_OUTPUT = Rule("output_layer.weight", {VALUE_HEAD: ("one", "hidden")}, Replicated())


def entries(config: ModelConfig, role: Role) -> list[Entry]:
    """All parameters of the whole model, in the order of Hugging Face files: encoder, embedding, layers, norm, head."""
    sizes, family = dims(config), family_of(config)
    rules, text = [], "model."
    if family.vision is not None:
        text = family.vision.text_prefix
        for name, shape in parameter_shapes(config.vision_config).items():
            rules.append(Entry(f"vision.{name}", {family.vision.encoder_prefix + name: shape}, Replicated()))
    rules.append(_fill(_EMBEDDING, sizes, hf_prefix=text))
    for layer in range(text_config(config).num_hidden_layers):
        for rule in family.layer(config, layer):
            experts = range(sizes["experts"]) if "{expert}" in rule.megatron else [0]
            rules.extend(
                _fill(rule, sizes, f"decoder.layers.{layer}.", f"{text}layers.{layer}.", expert) for expert in experts
            )
    rules.append(_fill(_FINAL_NORM, sizes, hf_prefix=text))
    if role == "critic":
        rules.append(_fill(_VALUE_OUTPUT, sizes))
    # A tied head is the embedding and has no separate tensor.
    elif not config.tie_word_embeddings:
        rules.append(_fill(_LM_HEAD, sizes))
    return rules


def frozen_parameters(config: ModelConfig, role: Role, patterns: Sequence[str]) -> set[str]:
    """Megatron's names (of the tables) of the parameters whose tensors match ``patterns``.

    A pattern is a shell's (``*.self_attn.*``) for whole Hugging Face names, so it means the same for every layer
    implementation. Raises ModelError for a pattern without a match, for a part of what is one parameter in Megatron
    (q_proj without k_proj and v_proj), and if nothing is left to train.
    """
    found, all_entries = set(), entries(config, role)
    expressions = {pattern: re.compile(fnmatch.translate(pattern)) for pattern in patterns}
    unused = set(patterns)
    for entry in all_entries:
        matching = {pattern: [name for name in entry.hf if expressions[pattern].match(name)] for pattern in patterns}
        unused -= {pattern for pattern, names in matching.items() if names}
        matched = {name for names in matching.values() for name in names}
        if matched and len(matched) < len(entry.hf):
            raise ModelError(
                f"{', '.join(sorted(matched))}: one parameter in Megatron together with "
                f"{', '.join(sorted(set(entry.hf) - matched))}; match all of them, or none"
            )
        if matched:
            found.add(entry.megatron)
    if unused:
        some = [name for entry in all_entries[:12] for name in entry.hf]
        raise ModelError(f"{sorted(unused)[0]!r} matches no tensor of the model; its tensors are {', '.join(some)}, ...")
    if len(found) == len(all_entries):
        raise ModelError("all parameters match, so nothing would train; leave some out")
    return found


def stacked_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Maps matrices of all experts of a layer, in one tensor, to their shapes in the hub's files; empty in most families."""
    stacked = (entry for entry in entries(config, "policy") if entry.part is not None)
    return {name: shape for entry in stacked for name, shape in entry.hf.items() if len(shape) == 3}


def _fill(rule: Rule, sizes: Dims, megatron_prefix: str = "", hf_prefix: str = "", expert: int = 0) -> Entry:
    return Entry(
        megatron=megatron_prefix + rule.megatron.format(expert=expert),
        hf={hf_prefix + name.format(expert=expert): tuple(sizes[d] for d in shape) for name, shape in rule.hf.items()},
        transform=rule.transform,
        part=(expert, sizes["experts"]) if rule.is_stacked else None,
    )


_NAME_VARIANTS = (
    # Transformer Engine fuses a norm into the following linear layer.
    (re.compile(r"self_attention\.(?:linear_qkv|in_proj)\.layer_norm_(weight|bias)$"), r"input_layernorm.\1"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_(weight|bias)$"), r"pre_mlp_layernorm.\1"),
    (
        re.compile(r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_(weight|bias)$"),
        r"self_attention.\1_layernorm.\2",
    ),
    # Adapters of a grouped linear layer are numbered too.
    (re.compile(r"mlp\.experts\.(linear_fc[12])\.lora\.(\d+)\."), r"mlp.experts.\2.\1.lora."),
    # Transformer Engine's grouped linear layers number the experts at the end; Megatron's own layers keep them in a list.
    (re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$"), r"mlp.experts.\3.\1.\2"),
    (re.compile(r"mlp\.experts\.local_experts\."), "mlp.experts."),
)


def canonical_name(name: str) -> str:
    """A Megatron parameter's name as used in the tables, for any layer implementation."""
    for pattern, replacement in _NAME_VARIANTS:
        name = pattern.sub(replacement, name)
    return name
