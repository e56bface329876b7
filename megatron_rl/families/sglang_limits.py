"""Models that SGLang computes otherwise than transformers and this trainer, without saying so. Pure; read from config.json.

Found by reading the models of SGLang 0.5.23. A run that samples from such a model is refused before anything starts, for
the check of log-probs at its first step would stop it anyway; training without servers (sft, reward-train), convert and
doctor take these models.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

_SPARSE_EVERYWHERE = ("qwen3_moe", "qwen3_vl_moe", "qwen3_vl_moe_text")
_NEVER_TIED = ("qwen3_moe", "mixtral", "glm4_moe")
_QWEN2_5_VL_PATCH_VALUES = 1176
"""3 channels x 2 frames x 14 x 14 pixels."""
_FACTOR_TOLERANCE = 1e-6
_OTHERWISE = "use another checkpoint, or train it without SGLang (sft, reward-train)"


def engine_problems(model: Mapping[str, Any], path: object) -> Iterator[str]:
    """What SGLang would compute otherwise for a config.json; ``path`` is its name in the messages."""
    text = model.get("text_config", model)
    model_type = model["model_type"]
    where = f"policy.path: {path}"
    if model_type in _SPARSE_EVERYWHERE:
        if text.get("mlp_only_layers"):
            yield (
                f"{where}: mlp_only_layers={text['mlp_only_layers']}: SGLang's {model_type} takes every layer for a "
                f"mixture of experts; {_OTHERWISE}"
            )
        if text.get("decoder_sparse_step", 1) != 1:
            yield (
                f"{where}: decoder_sparse_step={text['decoder_sparse_step']}: SGLang's {model_type} takes every layer "
                f"for a mixture of experts; {_OTHERWISE}"
            )
    if model_type in _NEVER_TIED and model.get("tie_word_embeddings"):
        yield (
            f"{where}: tie_word_embeddings=true: SGLang gives {model_type} a head of its own, which no tensor fills; "
            "store a copy of model.embed_tokens.weight as lm_head.weight and set tie_word_embeddings to false"
        )
    if model_type == "mixtral":
        yield from _mixtral(text, where)
    if model_type == "qwen2_5_vl":
        yield from _qwen2_5_vl(model.get("vision_config", {}), where)
    yield from _rope(model_type, _rope_of(text), where)


def split_problems(model: Mapping[str, Any], tensor_parallel_size: int, path: object) -> Iterator[str]:
    """Why SGLang cannot split the model over ``tensor_parallel_size`` ranks of a server."""
    text = model.get("text_config", model)
    heads = text.get("num_attention_heads", tensor_parallel_size)
    groups = text.get("num_key_value_heads") or heads
    where = f"rollout.tensor_parallel_size: {tensor_parallel_size}"
    if heads % tensor_parallel_size:
        yield f"{where} does not divide num_attention_heads={heads} of {path}"
    # Fewer groups than ranks are copied, which has to come out even too.
    elif max(groups, tensor_parallel_size) % min(groups, tensor_parallel_size) and model["model_type"] != "deepseek_v3":
        yield f"{where} and num_key_value_heads={groups} of {path}: expected one to divide the other"


def _rope_of(text: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters as newer (rope_parameters) or older files (rope_theta, rope_scaling) have them."""
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    if "rope_theta" in text:
        rope.setdefault("rope_theta", text["rope_theta"])
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    return rope


def _qwen2_5_vl(vision: Mapping[str, Any], where: str) -> Iterator[str]:
    channels = vision.get("in_channels") or vision.get("in_chans") or 3
    values = channels * vision.get("temporal_patch_size", 2) * vision.get("patch_size", 14) ** 2
    if values != _QWEN2_5_VL_PATCH_VALUES:
        yield (
            f"{where}: vision_config.patch_size={vision.get('patch_size', 14)}: a patch has {values} values, but SGLang's "
            f"qwen2_5_vl takes all but {_QWEN2_5_VL_PATCH_VALUES} for finished features and crashes; {_OTHERWISE}"
        )


def _mixtral(text: Mapping[str, Any], where: str) -> Iterator[str]:
    rope, heads, hidden = _rope_of(text), text.get("num_attention_heads", 1), text.get("hidden_size", 0)
    if rope["rope_type"] != "default":
        yield f"{where}: rope_type={rope['rope_type']}: SGLang's mixtral does not scale rotary positions; {_OTHERWISE}"
    if text.get("head_dim") and text["head_dim"] * heads != hidden:
        yield (
            f"{where}: head_dim={text['head_dim']}: SGLang's mixtral takes hidden_size / num_attention_heads = "
            f"{hidden / heads:g}; {_OTHERWISE}"
        )
    theta = rope.get("rope_theta", 0)
    if theta != int(theta):
        yield f"{where}: rope_theta={theta}: SGLang's mixtral drops the fraction; {_OTHERWISE}"


def _rope(model_type: str, rope: Mapping[str, Any], where: str) -> Iterator[str]:
    kind = rope["rope_type"]
    if model_type == "deepseek_v3" and kind not in ("default", "yarn"):
        yield f"{where}: rope_type={kind}: SGLang's deepseek_v3 computes yarn whatever the type says; {_OTHERWISE}"
        return
    if kind != "yarn" or model_type == "mixtral":
        return
    if model_type == "deepseek_v3" and rope.get("truncate") is False:
        yield f"{where}: truncate=false of yarn: SGLang's deepseek_v3 always truncates the range; {_OTHERWISE}"
    factor = rope.get("factor") or 1.0
    expected = _attention_factor(rope, factor)
    own = _engine_scale(model_type, rope, factor)
    found = own * rope.get("attn_factor", 1.0)
    if not math.isclose(found, expected, rel_tol=_FACTOR_TOLERANCE):
        yield (
            f"{where}: the attention factor of yarn is {expected:.6g} for transformers (attention_factor, mscale, "
            f"mscale_all_dim) but {found:.6g} for SGLang, which reads attn_factor instead; put "
            f"attn_factor={expected / own:.9g} beside them, which transformers ignores"
        )


def _scale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """transformers' factor on cosine and sine."""
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return _scale(factor, rope["mscale"]) / _scale(factor, rope["mscale_all_dim"])
    return _scale(factor)


def _engine_scale(model_type: str, rope: Mapping[str, Any], factor: float) -> float:
    """SGLang's, before it is multiplied by ``attn_factor``."""
    mscale, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    if model_type == "deepseek_v3":
        mscale, all_dims = 1.0 if mscale is None else mscale, 0.0 if all_dims is None else all_dims
    if mscale is None or all_dims is None:
        return _scale(factor)
    return _scale(factor, mscale) / _scale(factor, all_dims)
