"""Detects models that SGLang silently computes differently from transformers and this trainer. Pure; reads config.json.

Source: the model files of SGLang 0.5.23. A run that samples from such a model is refused before anything starts,
because the parity check of its first step would stop it anyway. Training without servers (sft, reward-train),
convert and doctor accept these models.

Also reads the names of SGLang's options from its source, and maps a checkpoint's tensors to SGLang's parameters, which
join q/k/v, gate/up and the experts of a layer, and are padded on a CPU.
"""

import functools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_rl.families.family import SGLangSupport, families

_FACTOR_TOLERANCE = 1e-6
OTHERWISE = "use another checkpoint, or train it without SGLang (sft, reward-train)"


def engine_problems(model: Mapping[str, Any], path: object) -> Iterator[str]:
    """Yield a message for each difference between SGLang and transformers on this model.

    ``model`` is from ``facts.read_model_json``; ``path`` is its name in messages.
    """
    model_type = model["model_type"]
    served = families()[model_type].served
    where = f"policy.path: {path}"
    if served.is_sparse_everywhere:
        dense = {
            "mlp_only_layers": model.get("mlp_only_layers"),
            "decoder_sparse_step": model.get("decoder_sparse_step", 1),
        }
        for name, value in dense.items():
            if value and value != 1:
                yield (
                    f"{where}: {name}={value}: SGLang's {model_type} treats every layer as a mixture of experts; "
                    f"{OTHERWISE}"
                )
    if served.is_never_tied and model.get("tie_word_embeddings"):
        yield (
            f"{where}: tie_word_embeddings=true: SGLang gives {model_type} a separate head, which no tensor fills; "
            "store a copy of model.embed_tokens.weight as lm_head.weight and set tie_word_embeddings to false"
        )
    yield from served.problems(model, where)
    if served.scales_rope:
        yield from _rope(model_type, served, rope_of(model), where)


def cpu_problems(model: Mapping[str, Any], path: object) -> Iterator[str]:
    """Yield a message if SGLang cannot serve this model on a CPU: its ``get_rope_cpu`` has only DeepSeek's yarn."""
    rope = rope_of(model)
    if families()[model["model_type"]].served.rope_is_yarn and rope["rope_type"] != "yarn":
        yield (
            f"policy.path: {path}: on a CPU SGLang computes rotary positions of {model['model_type']} only with yarn, and the file has "
            'none; add "rope_scaling": {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": '
            f"{model.get('max_position_embeddings', 4096)}}}, which changes no number, or serve it on GPUs (a dry run for them: "
            "--gpus-per-node)"
        )


def split_problems(model: Mapping[str, Any], tensor_parallel_size: int, path: object) -> Iterator[str]:
    """Yield a message for each size that SGLang cannot split over ``tensor_parallel_size`` ranks of a server."""
    heads = model.get("num_attention_heads", tensor_parallel_size)
    groups = model.get("num_key_value_heads") or heads
    has_groups = not families()[model["model_type"]].is_latent
    where = f"rollout.tensor_parallel_size: {tensor_parallel_size}"
    if heads % tensor_parallel_size:
        yield f"{where} does not divide num_attention_heads={heads} of {path}"
    # SGLang replicates the groups if there are fewer groups than ranks; each group needs the same number of ranks.
    elif max(groups, tensor_parallel_size) % min(groups, tensor_parallel_size) and has_groups:
        yield f"{where} and num_key_value_heads={groups} of {path}: expected one to divide the other"


def rope_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters of a model's newer (rope_parameters) or older file (rope_theta, rope_scaling)."""
    rope = dict(model.get("rope_parameters") or model.get("rope_scaling") or {})
    if "rope_theta" in model:
        rope.setdefault("rope_theta", model["rope_theta"])
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    return rope


def _rope(model_type: str, served: SGLangSupport, rope: Mapping[str, Any], where: str) -> Iterator[str]:
    kind = rope["rope_type"]
    if served.rope_is_yarn and kind not in ("default", "yarn"):
        yield f"{where}: rope_type={kind}: SGLang's {model_type} computes yarn for every type; {OTHERWISE}"
        return
    if kind != "yarn":
        return
    if served.rope_is_yarn and rope.get("truncate") is False:
        yield f"{where}: truncate=false of yarn: SGLang's {model_type} always truncates the range; {OTHERWISE}"
    factor = rope.get("factor") or 1.0
    expected = _attention_factor(rope, factor)
    base = _sglang_scale(served, rope, factor)
    actual = base * rope.get("attn_factor", 1.0)
    if not math.isclose(actual, expected, rel_tol=_FACTOR_TOLERANCE):
        yield (
            f"{where}: the attention factor of yarn is {expected:.6g} for transformers (attention_factor, mscale, "
            f"mscale_all_dim) but {actual:.6g} for SGLang, which reads attn_factor instead; put "
            f"attn_factor={expected / base:.9g} next to them, which transformers ignores"
        )


def _scale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """Factor of transformers on cosine and sine."""
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return _scale(factor, rope["mscale"]) / _scale(factor, rope["mscale_all_dim"])
    return _scale(factor)


def _sglang_scale(served: SGLangSupport, rope: Mapping[str, Any], factor: float) -> float:
    """Factor of SGLang on cosine and sine, without ``attn_factor``."""
    mscale, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    # Only these families have defaults for both scales; the others ignore one without the other.
    if served.rope_is_yarn:
        mscale, all_dims = 1.0 if mscale is None else mscale, 0.0 if all_dims is None else all_dims
    if mscale is None or all_dims is None:
        return _scale(factor)
    return _scale(factor, mscale) / _scale(factor, all_dims)


_FIELD = re.compile(r"^    (\w+): A\[\s*(?:Optional\[)?(int|float|bool|str)?", re.MULTILINE)
_ALIAS = re.compile(r'"--([a-z0-9][a-z0-9-]*)"')


@functools.cache
def server_flags() -> dict[str, str]:
    """Map the options of the installed SGLang to their types: int, float, bool, str, or empty if unknown.

    The names are read from SGLang's source, because its import takes seconds. Returns {} if SGLang is not installed.
    """
    found = find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return {}
    folder = Path(found.submodule_search_locations[0], "srt")
    texts = [path.read_text(encoding="utf-8") for path in (folder / "server_args.py", *folder.glob("arg_groups/**/*.py")) if path.is_file()]
    flags = dict.fromkeys(_ALIAS.findall("".join(texts)), "")
    return flags | {name.replace("_", "-"): kind for text in texts for name, kind in _FIELD.findall(text)}


_FP8_UPDATES = ("qwen2", "qwen3")
"""Families whose loaders in SGLang 0.5.23 accept new weights on an fp8 server (``flash_rl``)."""


def quantization_problem(quantization: object, load_format: object, model_type: object) -> str:
    """Reason why a server that quantizes at loading cannot take the trainer's weights, or an empty string if it can.

    In SGLang 0.5.23, Fp8LinearMethod replaces the loaded parameters by new, transposed parameters without loaders,
    and has no ``restore_weights_before_loading`` that would restore them for an update. Other methods do the same.
    """
    if quantization in (None, False, "", "unquant"):
        return ""
    if quantization == "fp8" and load_format == "flash_rl" and model_type in _FP8_UPDATES:
        return ""
    return (
        f"quantization {quantization}: SGLang replaces the weights that it loads by quantized ones, which cannot take the trainer's "
        f"weights: the first publish would fail. Remove this option; for dense models ({', '.join(_FP8_UPDATES)}), fp8 servers "
        "take a trainer's weights with load-format: flash_rl"
    )


_CPU_MULTIPLE = 32
_INNER = {
    "gate_up_proj.weight": -2,
    "gate_up_proj.bias": -1,
    "w13_weight": -2,
    "w13_weight_bias": -1,
    "down_proj.weight": -1,
    "w2_weight": -1,
}
"""Maps ends of names of parameters of MLPs and experts to their dimension of inner features."""
_EXPERT = re.compile(r"^(?P<prefix>.*\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\.weight$")


def joined_name(name: str, server_names: Collection[str]) -> tuple[str, int] | None:
    """The server parameter that contains the Hugging Face tensor ``name``, and the tensor's index in it.

    The family is inferred from the names that the server has. Returns None if no family's joined name is among them.
    """
    if name in server_names:
        return name, 0
    for family in families().values():
        joined, index = _joined(name, family.served)
        if joined in server_names:
            return joined, index
    return None


def cpu_padding(server_name: str, shape: Sequence[int], num_shared_experts: int | None = None) -> tuple[int, ...]:
    """Zeros that a server on a CPU appends to each dimension of a tensor of ``shape`` in its parameter ``server_name``.

    SGLang rounds the inner features of MLPs up to a multiple of 32 (``adjust_config_with_unaligned_cpu_tp``, one rank), those of
    the ``num_shared_experts`` in one MLP (``n_shared_experts`` of config.json) for each.
    """
    zeros, inner = [0] * len(shape), next((place for ends, place in _INNER.items() if server_name.endswith(ends)), 0)
    if inner:
        # gpt-oss stores gate and up of all experts in one tensor, with alternating rows.
        has_both = "w13" in server_name and (len(shape) == 3 or "bias" in server_name)
        parts = 2 if has_both else (num_shared_experts or 1) if ".shared_experts." in server_name else 1
        zeros[inner] = parts * (-(shape[inner] // parts) % _CPU_MULTIPLE)
    return tuple(zeros)


def is_float32(server_name: str) -> bool:
    """Return whether servers of a family keep this parameter in float32, whatever the model's dtype."""
    return any(server_name.endswith(family.served.float32) for family in families().values())


def _joined(name: str, served: SGLangSupport) -> tuple[str, int]:
    name = name.replace(served.omitted, "")
    expert = _EXPERT.match(name)
    if expert and expert["projection"] in served.expert_parts:
        parameter, index, parts_per_expert = served.expert_parts[expert["projection"]]
        return f"{expert['prefix']}.{parameter}", int(expert["expert"]) * parts_per_expert + index
    modules = name.split(".")
    for i, module in enumerate(modules):
        if module in served.joined:
            parameter, index = served.joined[module]
            return ".".join([*modules[:i], parameter, *modules[i + 1 :]]), index
    return name, 0
