"""Loads a Hugging Face config.json, and refuses models that Megatron would silently compute differently."""

from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from megatron_rl.errors import ModelError
from megatron_rl.families.family import families, family_of
from megatron_rl.families.model_facts import (
    dims,
    has_linear_attention,
    is_supported,
    read_model_json,
    router_groups,
    takes_images,
    text_config,
)
from megatron_rl.families.rotary import inverse_frequencies, rope_parameters
from megatron_rl.families.vision_encoder import num_deepstack
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from megatron_rl.system.megatron_core import linear_attention_problem

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary types whose frequencies do not depend on the sequence length."""


def load_hf_config(path: str | Path) -> PretrainedConfig:
    """Read and check ``path``/config.json.

    Raises:
        FileNotFoundError: folder or file is missing.
        ModelError: malformed JSON, or a model family or feature that is not supported.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"model folder {folder} does not exist; a path is a local folder, not a hub repository")
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no config.json; a Hugging Face model folder is expected")
    model_type = read_model_json(folder).get("model_type")
    if not is_supported(model_type):
        raise ModelError(f"{file}: model_type {model_type!r} is not supported; supported: {', '.join(families())}")
    register_aliases()
    # Declared first, because some families' configurations import torchvision, for models that this project never builds.
    declare_torchvision_ops()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the constructors of transformers raise various exceptions
        reason = " ".join(str(error).split())
        raise ModelError(f"{file} is not a configuration that transformers accepts: {reason}") from error
    _check_features(config, file)
    return config


def register_aliases() -> None:
    """Let transformers read families by the class of another one (``Family.read_as``), instead of by code from a model's folder."""
    for model_type, family in families().items():
        if family.read_as and model_type not in CONFIG_MAPPING:
            alias = type(f"Alias_{model_type}", (CONFIG_MAPPING[family.read_as],), {"model_type": model_type})
            AutoConfig.register(model_type, alias)


def _check_features(config: PretrainedConfig, file: Path) -> None:
    _check_fields(config, file)
    _check_attention(config, file)
    _check_linear_attention(config, file)
    _check_experts(config, file)
    if takes_images(config):
        _check_vision(config, file)
    _check_rope(config, file)


def _check_fields(config: PretrainedConfig, file: Path) -> None:
    family, kinds = family_of(config), getattr(text_config(config), "layer_types", None) or ()
    expected: dict[str, Any] = {"hidden_act": "silu", "attention_dropout": 0.0, **family.forbidden}
    if any(kind not in family.layer_types for kind in kinds):
        expected["layer_types"] = [family.layer_types[0]] * text_config(config).num_hidden_layers
    for name, value in expected.items():
        actual = getattr(text_config(config), name, value)
        # null, false and 0 are equivalent.
        if actual != value and (actual or value):
            raise ModelError(f"{file}: {name} = {actual!r} is not supported for {config.model_type}, only {value!r}")
    if "sliding_attention" in kinds and not text_config(config).sliding_window:
        raise ModelError(f"{file}: sliding_window is missing, but layer_types has layers with a window (sliding_attention)")
    quantization = getattr(config, "quantization_config", None)
    if quantization and not (family.reads_mxfp4 and quantization.get("quant_method") == "mxfp4"):
        raise ModelError(
            f"{file}: quantization_config: quantized weights are not supported; use a copy in bfloat16 or float32, "
            "without quantization_config"
        )


def _check_attention(config: PretrainedConfig, file: Path) -> None:
    family, sizes, rope = family_of(config), dims(config), rope_parameters(config)
    if rope["rope_type"] not in _ROPE_TYPES:
        supported = ", ".join(_ROPE_TYPES)
        raise ModelError(f"{file}: rope_type {rope['rope_type']!r} is not supported; supported: {supported}")
    partial = rope.get("partial_rotary_factor", 1.0)
    if partial != 1.0 and not family.takes_partial_rotary:
        raise ModelError(
            f"{file}: partial_rotary_factor {partial} is not supported for {config.model_type}, only 1.0: "
            "transformers rotates whole heads in this family"
        )
    if sizes["heads"] % sizes["groups"] != 0:
        raise ModelError(
            f"{file}: num_attention_heads {sizes['heads']} does not divide by num_key_value_heads {sizes['groups']}"
        )
    if family.is_latent and sizes["heads"] != sizes["groups"]:
        raise ModelError(
            f"{file}: num_key_value_heads {sizes['groups']} is not num_attention_heads {sizes['heads']}; with latent "
            "attention every head has its own key"
        )


def _check_linear_attention(config: PretrainedConfig, file: Path) -> None:
    if not has_linear_attention(config):
        return
    problem = linear_attention_problem()
    if problem:
        raise ModelError(f"{file}: linear attention (Gated DeltaNet) of {config.model_type}: {problem}")
    heads, keys = (dims(config)[name] for name in ("linear_heads", "linear_key_heads"))
    if heads % keys:
        raise ModelError(f"{file}: linear_num_value_heads {heads} does not divide by linear_num_key_heads {keys}")


def _check_experts(config: PretrainedConfig, file: Path) -> None:
    if family_of(config).experts is None:
        return
    experts = dims(config)["experts"]
    if not experts:
        raise ModelError(
            f"{file}: no layer of this {config.model_type} is a mixture of experts; Megatron Core needs one (see "
            "first_k_dense_replace, decoder_sparse_step, mlp_only_layers and the number of experts)"
        )
    _check_router(config, experts, file)


def _check_rope(config: PretrainedConfig, file: Path) -> None:
    sizes, rope = dims(config), rope_parameters(config)
    try:
        frequencies, _ = inverse_frequencies(config)
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise ModelError(f"{file}: rope_parameters {rope} are not complete: {error!r}") from error
    partial = rope.get("partial_rotary_factor", 1.0)
    is_latent = family_of(config).is_latent
    rotated = text_config(config).qk_rope_head_dim if is_latent else int(sizes["head_dim"] * partial)
    if 2 * len(frequencies) != rotated or not frequencies.isfinite().all():
        raise ModelError(
            f"{file}: rope_parameters {rope} give {len(frequencies)} frequencies, finite or not, for {rotated} rotary "
            "dimensions of a head; expected one finite frequency per two dimensions (see factor, head_dim, "
            "qk_rope_head_dim)"
        )


def _check_vision(config: PretrainedConfig, file: Path) -> None:
    text, vision = config.text_config, config.vision_config
    if vision.out_hidden_size != text.hidden_size:
        raise ModelError(
            f"{file}: vision_config.out_hidden_size {vision.out_hidden_size} is not text_config.hidden_size "
            f"{text.hidden_size}"
        )
    for name in ("image_token_id", "video_token_id"):
        if not 0 <= getattr(config, name) < text.vocab_size:
            raise ModelError(
                f"{file}: {name} {getattr(config, name)} is not in the vocabulary of {text.vocab_size} tokens"
            )
    if num_deepstack(vision) > text.num_hidden_layers:
        raise ModelError(
            f"{file}: vision_config.deepstack_visual_indexes names {num_deepstack(vision)} layers, more than "
            f"text_config.num_hidden_layers {text.num_hidden_layers}"
        )
    section = rope_parameters(config).get("mrope_section")
    head_dim = dims(config)["head_dim"]
    if not isinstance(section, list) or len(section) != 3 or 2 * sum(section) != head_dim:
        raise ModelError(
            f"{file}: rope_parameters.mrope_section {section} is not three numbers that add up to {head_dim // 2}, half "
            "of a head"
        )


def _check_router(config: PretrainedConfig, experts: int, file: Path) -> None:
    text = text_config(config)
    chosen = text.num_experts_per_tok
    if not 0 < chosen <= experts:
        raise ModelError(f"{file}: num_experts_per_tok {chosen} is not in [1, {experts}], the number of experts")
    if chosen == 1 and not family_of(config).transformer_kwargs(config).get("moe_router_pre_softmax"):
        raise ModelError(
            f"{file}: num_experts_per_tok 1 with normalized probabilities gives every expert the weight 1, which "
            "Megatron Core does not compute; expected at least 2, or norm_topk_prob false in a family that has it"
        )
    groups, chosen_groups = router_groups(config)
    if not 0 < chosen_groups <= groups or experts % groups:
        raise ModelError(
            f"{file}: n_group {groups} and topk_group {chosen_groups} do not fit {experts} experts; expected groups of "
            "equal size and 1 <= topk_group <= n_group"
        )
    if chosen_groups < groups and chosen // chosen_groups != 2:
        raise ModelError(
            f"{file}: num_experts_per_tok {chosen} with topk_group {chosen_groups}: Megatron Core scores a group by its "
            f"best {chosen // chosen_groups} experts, transformers by its best 2; only two experts per group are supported"
        )
    per_group = experts // groups
    if groups > 1 and (per_group < 2 or chosen > chosen_groups * per_group):
        raise ModelError(
            f"{file}: n_group {groups} and topk_group {chosen_groups} leave {per_group} experts per group, for "
            f"num_experts_per_tok {chosen}; expected at least 2 per group, and enough in topk_group of them"
        )
