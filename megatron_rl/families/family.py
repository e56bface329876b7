"""What a family's file says (``Family``), and the families that there are: every module of this package with a ``FAMILY``.

Shapes are names of sizes (``facts.dims``), so that a table can be read and every tensor of a checkpoint can be checked
before it is used.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_rl.errors import ModelError

# The tables' transforms need torch; the check of a configuration imports this module and should not wait for it.
if TYPE_CHECKING:
    from megatron_rl.families.transforms import Transform

ModelConfig = Any
"""A model's configuration, read by attributes: transformers' PretrainedConfig, or config.json (``facts.as_config``)."""


@dataclass(frozen=True)
class Rule:
    """How one of Megatron's parameters is made of a checkpoint's tensors."""

    megatron: str
    """Parameter name; inside a layer without the prefix ``decoder.layers.N.``; ``{expert}`` for each expert."""
    hf: Mapping[str, tuple[str, ...]]
    """Hugging Face names, inside a layer without ``model.layers.N.``, and shapes by names of sizes."""
    transform: "Transform"
    is_stacked: bool = False
    """The tensors hold all experts, along their first dimension; the transform takes one expert's part."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, by the names of config.json."""

    in_layer: Callable[[ModelConfig, int], bool]
    """Whether a decoder layer of the language model, by its index, has experts."""
    number: tuple[str, ...]
    """The number of experts of a layer; the first name that is there counts."""
    ffn_size: str = "moe_intermediate_size"
    """The inner features of an expert."""
    groups: tuple[str, str] | None = None
    """The number of groups of experts, and how many of them a token's experts may come from."""
    has_bias: bool = False
    """The router adds a bias to the scores before it chooses (auxiliary-loss-free balancing, arXiv 2408.15664)."""


@dataclass(frozen=True)
class VisionSpec:
    """A vision-language model. Its config.json describes the language model as ``text_config``."""

    encoder_prefix: str
    """How files begin the names of the encoder's tensors ..."""
    text_prefix: str
    """... and those of the language model's."""
    title: str
    """The family's name as people write it."""
    interleaves_positions: bool
    """Rotary dimensions of time, height and width take turns; else they follow one another."""
    token_ids: tuple[str, ...] = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    """Fields of config.json with the ids that only prompts may contain."""


JOINED: Mapping[str, tuple[str, int]] = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
EXPERT_PARTS: Mapping[str, tuple[str, int, int]] = {
    "gate_proj": ("w13_weight", 0, 2),
    "up_proj": ("w13_weight", 1, 2),
    "down_proj": ("w2_weight", 0, 1),
}


def _nothing(model: Mapping[str, Any], where: str) -> Iterator[str]:
    yield from ()


@dataclass(frozen=True)
class SGLangSupport:
    """What SGLang makes of the family: its names of parameters, and what it computes otherwise than transformers.

    Found by reading the models of SGLang 0.5.23.
    """

    joined: Mapping[str, tuple[str, int]] = field(default_factory=lambda: JOINED)
    """Hugging Face module -> (SGLang's module, place among the parts that are joined along the first dimension)."""
    expert_parts: Mapping[str, tuple[str, int, int]] = field(default_factory=lambda: EXPERT_PARTS)
    """Projection of one expert -> (SGLang's parameter, place within the expert, parts of an expert)."""
    is_sparse_everywhere: bool = False
    """It takes every layer for a mixture of experts."""
    is_never_tied: bool = False
    """It gives the model a head of its own, which no tensor fills where config.json ties it to the embedding."""
    scales_rope: bool = True
    """It knows the scalings of rotary positions."""
    rope_is_yarn: bool = False
    """It computes every scaling as yarn with a truncated range, and has defaults of its own for its factors."""
    problems: Callable[[Mapping[str, Any], str], Iterator[str]] = _nothing
    """What else it cannot serve: (config.json, the beginning of the messages) -> messages."""


@dataclass(frozen=True)
class Family:
    """One ``model_type``: its table of parameters, and what its configuration means."""

    layer: Callable[[ModelConfig, int], tuple[Rule, ...]]
    """Rules of one decoder layer, by its index."""
    transformer_kwargs: Callable[[ModelConfig], dict[str, Any]]
    """What this family adds to Megatron's TransformerConfig."""
    forbidden: Mapping[str, Any]
    """Configuration fields that must be absent or equal to this value: other values are not implemented."""
    experts: Experts | None = None
    vision: VisionSpec | None = None
    is_latent: bool = False
    """Multi-head latent attention (MLA) instead of grouped-query attention."""
    takes_partial_rotary: bool = False
    """Whether ``partial_rotary_factor`` means something to this family; to the others it is unknown."""
    num_mtp_layers: str = ""
    """The name of the number of multi-token-prediction layers in config.json; empty where there are none."""
    served: SGLangSupport = field(default_factory=SGLangSupport)


@functools.cache
def families() -> Mapping[str, Family]:
    """All families by model_type, sorted; the files are imported at the first call."""
    # The package's path, not this file's folder: another package may add a folder to it.
    package = importlib.import_module(__package__)
    modules = (
        importlib.import_module(f"{__package__}.{found.name}") for found in pkgutil.iter_modules(package.__path__)
    )
    found = {module.__name__.rpartition(".")[2]: module.FAMILY for module in modules if hasattr(module, "FAMILY")}
    return dict(sorted(found.items()))


def family_of(config: ModelConfig) -> Family:
    """ModelError for a model_type that no family has."""
    family = families().get(config.model_type)
    if family is None:
        raise ModelError(f"model_type {config.model_type!r} is not supported; supported: {', '.join(families())}")
    return family
