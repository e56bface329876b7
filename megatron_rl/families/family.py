"""Defines ``Family``, the content of a family's file, and finds the families: all modules of this package with a ``FAMILY``.

Shapes are tuples of size names (``facts.dims``), so that the tables are readable and every tensor of a checkpoint
can be checked before it is used.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_rl.errors import ModelError

# Only for type checking: transforms import torch, and checking a configuration, which imports this module, must stay fast.
if TYPE_CHECKING:
    from megatron_rl.families.transforms import Transform

ModelConfig = Any
"""A model's configuration, read by attributes: transformers' PretrainedConfig, or config.json (``facts.as_config``)."""


@dataclass(frozen=True)
class Rule:
    """Mapping between one Megatron parameter and the tensors of a checkpoint."""

    megatron: str
    """Parameter name; inside a layer without the prefix ``decoder.layers.N.``; ``{expert}`` for each expert."""
    hf: Mapping[str, tuple[str, ...]]
    """Maps Hugging Face names (inside a layer without ``model.layers.N.``) to shapes given as size names."""
    transform: "Transform"
    is_stacked: bool = False
    """True if the tensors contain all experts along their first dimension; the transform then gets one expert's slice."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, described by field names of config.json."""

    in_layer: Callable[[ModelConfig, int], bool]
    """Function (config, layer index) that returns True if this decoder layer of the language model has experts."""
    number: tuple[str, ...]
    """Fields with the number of experts per layer; the first field that is present counts."""
    ffn_size: str = "moe_intermediate_size"
    """Field with the number of inner features of an expert."""
    groups: tuple[str, str] | None = None
    """Fields with the number of expert groups, and the number of groups that a token's experts may come from."""
    has_bias: bool = False
    """True if the router adds a bias to the scores before choosing (auxiliary-loss-free balancing, arXiv 2408.15664)."""


@dataclass(frozen=True)
class VisionSpec:
    """A vision-language model; config.json describes its language model as ``text_config``."""

    encoder_prefix: str
    """Prefix of the encoder's tensor names in files."""
    text_prefix: str
    """Prefix of the language model's tensor names in files."""
    title: str
    """The family's display name."""
    interleaves_positions: bool
    """True if the rotary dimensions of time, height and width are interleaved; False if they are consecutive blocks."""
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


def _no_sizes(text: ModelConfig) -> Mapping[str, int]:
    return {}


def _no_problems(model: Mapping[str, Any], where: str) -> Iterator[str]:
    yield from ()


@dataclass(frozen=True)
class SGLangSupport:
    """SGLang's implementation of the family: its parameter names, and its differences from transformers.

    Source: the model files of SGLang 0.5.23.
    """

    joined: Mapping[str, tuple[str, int]] = field(default_factory=lambda: JOINED)
    """Maps a Hugging Face module to (SGLang's module, index among the tensors concatenated along the first dimension)."""
    omitted: str = ""
    """Part of Hugging Face names that SGLang's names do not have."""
    expert_parts: Mapping[str, tuple[str, int, int]] = field(default_factory=lambda: EXPERT_PARTS)
    """Maps an expert's projection to (SGLang's parameter, index within the expert, projections per expert)."""
    float32: tuple[str, ...] = ()
    """Ends of names of parameters that a server keeps in float32, and a trainer in the model's dtype."""
    is_sparse_everywhere: bool = False
    """True if SGLang treats every layer as a mixture of experts."""
    is_never_tied: bool = False
    """True if SGLang gives the model a separate head, which no tensor fills if config.json ties it to the embedding."""
    scales_rope: bool = True
    """True if SGLang implements the scalings of rotary positions."""
    rope_is_yarn: bool = False
    """True if SGLang computes every scaling as yarn with a truncated range, with its own defaults of the factors."""
    problems: Callable[[Mapping[str, Any], str], Iterator[str]] = _no_problems
    """Function (config.json, prefix of the messages) that yields a message for each other feature SGLang cannot serve."""


@dataclass(frozen=True)
class Family:
    """One ``model_type``: its table of parameters, and the meaning of its configuration."""

    layer: Callable[[ModelConfig, int], tuple[Rule, ...]]
    """Function (config, layer index) that returns the rules of one decoder layer."""
    transformer_kwargs: Callable[[ModelConfig], dict[str, Any]]
    """Function that returns the family's additional arguments of Megatron's TransformerConfig."""
    forbidden: Mapping[str, Any]
    """Maps configuration fields to the only implemented value; each field must be absent or have this value."""
    experts: Experts | None = None
    vision: VisionSpec | None = None
    is_latent: bool = False
    """Multi-head latent attention (MLA) instead of grouped-query attention."""
    takes_partial_rotary: bool = False
    """True if the family reads ``partial_rotary_factor``, which other families do not know."""
    window: Callable[[ModelConfig, int], int | None] | None = None
    """Function (config, layer index) that returns the number of tokens that a token attends to, itself included; None: all."""
    unsplit: Mapping[str, str] = field(default_factory=dict)
    """Maps keys of ``parallel`` that must be 1 to the reason."""
    reads_mxfp4: bool = False
    """True if the family's files may store experts in 4-bit floating point with shared scales (MXFP4)."""
    is_linear: Callable[[ModelConfig, int], bool] | None = None
    """Function (config, layer index) that returns True if this decoder layer has linear attention (Gated DeltaNet)."""
    sizes: Callable[[ModelConfig], Mapping[str, int]] = _no_sizes
    """Function that returns the family's own size names (``facts.dims``) of the language model's configuration."""
    fresh: Mapping[str, float] = field(default_factory=dict)
    """Maps ends of names of vectors to the value of a fresh model, where it is not 1 for weights and 0 for biases."""
    num_mtp_layers: str = ""
    """Field of config.json with the number of multi-token-prediction layers; empty if the family has none."""
    mtp_prefix: str = ""
    """Prefix of these layers' tensors in files; empty if files number them after the decoder's layers."""
    served: SGLangSupport = field(default_factory=SGLangSupport)
    read_as: str = ""
    """The ``model_type`` whose class in transformers reads config.json; empty: the family's own."""

    @property
    def layer_types(self) -> list[str]:
        """Supported values in the field ``layer_types``."""
        possible = {"full_attention": True, "sliding_attention": self.window, "linear_attention": self.is_linear}
        return [name for name, holds in possible.items() if holds]


@functools.cache
def families() -> Mapping[str, Family]:
    """All families, keyed by model_type and sorted; the files are imported at the first call."""
    # The package's path instead of this file's folder, because another package may add a folder to it.
    package = importlib.import_module(__package__)
    modules = (
        importlib.import_module(f"{__package__}.{info.name}") for info in pkgutil.iter_modules(package.__path__)
    )
    by_type = {module.__name__.rpartition(".")[2]: module.FAMILY for module in modules if hasattr(module, "FAMILY")}
    return dict(sorted(by_type.items()))


def family_of(config: ModelConfig) -> Family:
    """The family of ``config.model_type``. Raises ModelError if the type is not supported."""
    family = families().get(config.model_type)
    if family is None:
        raise ModelError(f"model_type {config.model_type!r} is not supported; supported: {', '.join(families())}")
    return family
