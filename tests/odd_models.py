"""Random odd models of every family, and a comparison of the Engine with transformers on their files.

config.json is written as people's files are (old and new names of the rotary parameters, fields left out, null), the weights
by transformers from that very file. Every model is computed alike, or refused in words by this project, or by transformers too.
"""

import collections
import json
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron_rl.config.schema import Dtype, ParallelConfig
from megatron_rl.data.batch import PackedBatch
from megatron_rl.errors import UserError
from megatron_rl.families.family import families
from megatron_rl.families.model_facts import has_vision, vision_token_ids
from megatron_rl.parallel import topology
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from megatron_rl.system.megatron_core import release
from megatron_rl.training.engine import Engine
from tests.integration.models_worker import pack
from tests.vision_batches import hf_logits, make_vision_batch

LINEAR_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text") if release() == "0.19" else ()
"""Families with linear attention, which Megatron Core 0.16 does not have."""
FAMILIES = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "kimi_k2", "glm4_moe", "gpt_oss"),
    *("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    *LINEAR_FAMILIES,
)
ATOL = 2e-4
"""Tolerance of log-probs in float32, for logits of this spread."""
_ODD = 0.02
"""Probability of a field value that most projects do not support."""
_WEIGHT_SCALE, _VECTOR_NOISE = 3.0, 0.1
_LATENT = ("deepseek_v3", "kimi_k2")
_Found = TypeVar("_Found")


class Verdict(NamedTuple):
    """A random model's result."""

    result: str
    """"same" as transformers, "refused" by this project, "refused by transformers" too or alone, or "WRONG"."""
    details: str = ""
    """The refusal, or what is wrong."""
    differences: Mapping[str, float] = MappingProxyType({})
    """Largest differences by what was compared."""


def odd_config(family: str, seed: int) -> dict[str, Any]:
    """config.json of a small model."""
    draw = random.Random(f"{family}/{seed}")
    text = _text(family, draw)
    if family in LINEAR_FAMILIES:
        _linear(family, text, draw)
    if "vl" not in family:
        return text
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tie = text.pop("tie_word_embeddings")
    if draw.random() < 0.15:
        text["tie_word_embeddings"] = draw.random() < 0.5
    around = {"vision_config": _vision(family, text, draw), **dict(zip(names, [90, 91, 92, 93], strict=True))}
    around |= {"tie_word_embeddings": tie} if tie is not None else {}
    if family == "qwen2_5_vl" and draw.random() < 0.4:
        # As the first files on the hub: the language model's fields next to the rest.
        return {**text, **around, "model_type": family}
    text["model_type"] = f"{family}_text"
    return {"model_type": family, "text_config": text, **around}


def _text(family: str, draw: random.Random) -> dict[str, Any]:
    groups = draw.choice([1, 2, 3, 4])
    heads = groups * draw.choice([1, 2, 3, 5])
    hidden = heads * draw.choice([2, 4, 6, 10, 16]) if draw.random() < 0.7 else 2 * draw.randint(5, 30)
    text: dict[str, Any] = {
        "model_type": family,
        "vocab_size": draw.choice([97, 101, 128, 131]),
        "hidden_size": hidden,
        "intermediate_size": draw.choice([17, 33, 40, 64, 81]),
        "num_hidden_layers": draw.randint(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": draw.choice([64, 256, 32768]),
        "rms_norm_eps": draw.choice([1e-6, 1e-5, 1e-3]),
        "initializer_range": 0.02,
        "hidden_act": "silu",
        "tie_word_embeddings": draw.random() < 0.4,
        "eos_token_id": 1,
        "pad_token_id": 0,
        draw.choice(["dtype", "torch_dtype"]): draw.choice(["float32", "bfloat16"]),
    }
    if hidden % heads or (hidden // heads) % 2 or draw.random() < 0.5 or family == "glm4_moe":
        text["head_dim"] = 2 * draw.randint(2, 12)
    elif draw.random() < 0.2:
        text["head_dim"] = None
    if family in ("qwen2", "qwen2_5_vl"):
        # The family has no head_dim of its own.
        text["hidden_size"] = heads * 2 * draw.randint(2, 8)
        if draw.random() < 0.7:
            text.pop("head_dim", None)
    if draw.random() < 0.15:
        text["num_key_value_heads"] = heads
    if draw.random() < 0.1:
        text.pop(
            draw.choice(
                ["rms_norm_eps", "initializer_range", "hidden_act", "tie_word_embeddings", "num_key_value_heads"]
            )
        )
    _experts(family, text, draw)
    if family == "gpt_oss":
        _windows(text, draw)
    _rope(family, text, draw)
    _oddities(family, text, draw)
    text.setdefault("tie_word_embeddings", None)
    if text["tie_word_embeddings"] is None and "vl" not in family:
        del text["tie_word_embeddings"]
    return text


def _experts(family: str, text: dict[str, Any], draw: random.Random) -> None:
    experts, chosen = draw.choice([(4, 2), (6, 3), (5, 4), (8, 2), (8, 4), (3, 1), (12, 6)])
    if family in ("qwen3_moe", "qwen3_vl_moe", "qwen3_next", "qwen3_5_moe_text"):
        text |= {
            draw.choice(["num_experts", "num_local_experts"]): experts,
            "num_experts_per_tok": chosen,
            "moe_intermediate_size": draw.choice([9, 16, 31]),
            "norm_topk_prob": draw.random() < 0.6,
            "decoder_sparse_step": draw.choice([1, 1, 1, 2]),
            "mlp_only_layers": draw.choice([[], [], [0], [1, 7]]),
        }
        if family in ("qwen3_vl_moe", "qwen3_5_moe_text"):
            del text["norm_topk_prob"]
        if family == "qwen3_5_moe_text":
            del text["decoder_sparse_step"], text["mlp_only_layers"]
    elif family in ("mixtral", "gpt_oss"):
        text |= {"num_local_experts": experts, "num_experts_per_tok": chosen, "sliding_window": None}
    elif family in (*_LATENT, "glm4_moe"):
        groups, chosen_groups = draw.choice([(1, 1), (1, 1), (2, 1), (4, 2), (4, 1), (2, 2), (3, 2), (4, 3)])
        text |= {
            "n_routed_experts": groups * draw.choice([2, 2, 3, 5, 1]) if groups > 1 else experts,
            "n_group": groups,
            "topk_group": chosen_groups,
            "num_experts_per_tok": 2 * chosen_groups + (draw.random() < 0.2) if groups > 1 else chosen,
            "n_shared_experts": draw.choice([0, 1, 1, 2, 3]),
            "moe_intermediate_size": draw.choice([9, 16, 31]),
            "first_k_dense_replace": draw.randint(0, text["num_hidden_layers"] - (draw.random() < 0.9)),
            "routed_scaling_factor": draw.choice([1.0, 1.8, 2.5]),
            "norm_topk_prob": draw.random() < 0.95,
            "num_nextn_predict_layers": draw.choice([0, 0, 1]),
        }
    if family in _LATENT:
        text.pop("head_dim", None)
        text |= {
            "q_lora_rank": draw.choice([None, 12, 21]),
            "kv_lora_rank": draw.choice([8, 18, 13]),
            "qk_nope_head_dim": draw.choice([4, 10, 7]),
            "qk_rope_head_dim": draw.choice([4, 6, 8]),
            "v_head_dim": draw.choice([6, 14, 5]),
            "rms_norm_eps": draw.choice([1e-6] * 9 + [1e-5]),
        }
        if draw.random() < 0.9:
            text["num_key_value_heads"] = text["num_attention_heads"]
    if family == "glm4_moe":
        text |= {"attention_bias": draw.random() < 0.5, "use_qk_norm": draw.random() < 0.5}


def _windows(text: dict[str, Any], draw: random.Random) -> None:
    text |= {
        "sliding_window": draw.choice([1, 2, 5, 8, 128, None] if draw.random() < 0.2 else [1, 3, 8, 128]),
        "swiglu_limit": draw.choice([7.0, 1.0, 0.3]),
    }
    if draw.random() < 0.7:
        text["layer_types"] = [draw.choice(["sliding_attention", "full_attention"]) for _ in range(text["num_hidden_layers"])]
    if draw.random() < _ODD:
        text["swiglu_alpha"] = 1.5


def _linear(family: str, text: dict[str, Any], draw: random.Random) -> None:
    key_heads, shared = draw.choice([1, 2, 3]), draw.choice([8, 20, 31])
    text |= {
        "linear_num_key_heads": key_heads,
        # Now and then not a multiple, which nobody computes.
        "linear_num_value_heads": key_heads * draw.choice([1, 2, 3]) + (draw.random() < _ODD),
        "linear_key_head_dim": draw.choice([4, 6, 9]),
        "linear_value_head_dim": draw.choice([4, 10, 7]),
        "linear_conv_kernel_dim": draw.choice([2, 3, 4]),
    }
    if family != "qwen3_5_text":
        text["shared_expert_intermediate_size"] = shared
    layers = text["num_hidden_layers"]
    if draw.random() < 0.4:
        text["layer_types"] = [draw.choice(["linear_attention", "full_attention"]) for _ in range(layers)]
    elif draw.random() < 0.7:
        text["full_attention_interval"] = draw.choice([1, 2, 3, 4])
    if draw.random() < 0.1:
        del text[draw.choice(["linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"])]
    if "head_dim" not in text or text["head_dim"] is None:
        text["head_dim"] = 2 * draw.randint(4, 12)


def _rope(family: str, text: dict[str, Any], draw: random.Random) -> None:
    kind = draw.choice(["default", "default", "linear", "yarn", "llama3"])
    if draw.random() < _ODD:
        kind = draw.choice(["dynamic", "longrope", "proportional", "nonsense"])
    rope = _scaling(kind, draw)
    if family in ("glm4_moe", *LINEAR_FAMILIES) and draw.random() < 0.7:
        rope["partial_rotary_factor"] = draw.choice([0.5, 0.25, 1.0])
    elif draw.random() < _ODD:
        rope["partial_rotary_factor"] = 0.5
    if "vl" in family:
        # Where it is left out, Qwen3-VL's heads have 128 dimensions whatever the hidden size.
        default = 128 if "qwen3" in family else text["hidden_size"] // text["num_attention_heads"]
        half = (text.get("head_dim") or default) // 2
        first = draw.randint(0, half // 3)
        second = draw.randint(0, (half - first) // 2)
        rope["mrope_section"] = [half - first - second, first, second]
        if "qwen3" in family:
            rope["mrope_interleaved"] = True
    _put_rope(kind, rope, family, text, draw)


def _put_rope(kind: str, rope: dict[str, Any], family: str, text: dict[str, Any], draw: random.Random) -> None:
    """In transformers 5's one field, or in the older two."""
    theta = draw.choice([10000.0, 10000, 500000.0, 1e6])
    if draw.random() < 0.5:
        text["rope_parameters"] = {"rope_theta": theta, "rope_type": kind, **rope}
        return
    text["rope_theta"] = theta
    if "partial_rotary_factor" in rope and draw.random() < 0.7:
        text["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if rope and kind == "default" and family == "qwen2_5_vl":
        text["rope_scaling"] = {"type": "mrope", **rope}
    elif rope:
        text["rope_scaling"] = {draw.choice(["type", "rope_type"]): kind, **rope}
    elif draw.random() < 0.3:
        text["rope_scaling"] = None


def _scaling(kind: str, draw: random.Random) -> dict[str, Any]:
    """The fields of this type of rotary scaling, some of them left out."""
    if kind == "default":
        return {}
    rope: dict[str, Any] = {"factor": draw.choice([2.0, 4, 8.0])}
    if kind in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = draw.choice([8, 16, 32])
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": draw.choice([2.0, 4.0])}
    if kind == "yarn":
        choices = {
            "attention_factor": [0.8, 1.2],
            "beta_fast": [16, 32.0],
            "beta_slow": [1, 2.0],
            "truncate": [True, False],
        }
        rope |= {name: draw.choice(values) for name, values in choices.items() if draw.random() < 0.3}
        if draw.random() < 0.4:
            rope |= {"mscale": draw.choice([0.7, 1.0]), "mscale_all_dim": draw.choice([0.5, 1.0])}
    return rope


def _oddities(family: str, text: dict[str, Any], draw: random.Random) -> None:
    layers = text["num_hidden_layers"]
    odd: list[dict[str, Any]] = [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": draw.choice(["gelu", "relu", "gelu_pytorch_tanh"])},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"sliding_window": 8},
        {"layer_types": ["full_attention"] * layers},
        {"layer_types": ["sliding_attention"] * layers},
        {"attention_dropout": 0.1},
        {"logit_scale": 0.5},
        {"logits_scaling": 8.0},
        {"attention_multiplier": 0.2},
        {"embedding_multiplier": 3.0},
        {"final_logit_softcapping": 5.0},
        {"pretraining_tp": 2},
        {"use_cache": False, "head_dim_extra": 3},
        {"norm_topk_prob": False},
        {"router_jitter_noise": 0.1},
        {"scoring_func": "softmax"},
        {"topk_method": "greedy"},
        {"moe_layer_freq": 2},
        {"rope_interleave": False},
        {"qkv_bias": False},
        {"use_qk_norm": False},
        {"rms_norm_eps": 1e-2},
        {"quantization_config": {"quant_method": "fp8"}},
        {"num_key_value_heads": text["num_attention_heads"]},
        {"bos_token_id": None, "architectures": ["Other"], "auto_map": {}},
    ]
    for fields in odd:
        if draw.random() < _ODD:
            text |= fields


def _vision(family: str, text: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    heads = draw.choice([1, 2, 3])
    vision: dict[str, Any] = {
        "depth": draw.randint(1, 3),
        "hidden_size": heads * 4 * draw.choice([1, 2, 4]),
        "intermediate_size": draw.choice([24, 31, 56]),
        "num_heads": heads,
        "in_channels": draw.choice([3, 1]),
        "patch_size": draw.choice([2, 4, 5]),
        "temporal_patch_size": draw.choice([1, 2]),
        "spatial_merge_size": draw.choice([1, 2]),
        "out_hidden_size": text["hidden_size"] + (2 if draw.random() < _ODD else 0),
    }
    if draw.random() < 0.2:
        vision["hidden_act"] = draw.choice(["gelu", "quick_gelu", "silu"])
    if family == "qwen2_5_vl":
        size = vision["patch_size"] * vision["spatial_merge_size"]
        vision |= {
            "window_size": size * draw.choice([1, 2, 3]),
            "fullatt_block_indexes": draw.choice([[], [0], [1, 2]]),
        }
        if draw.random() < 0.3:
            vision["tokens_per_second"] = draw.choice([1, 4])
    else:
        vision |= {
            "num_position_embeddings": draw.choice([16, 36]),
            "deepstack_visual_indexes": draw.choice([[], [0], [1, 0], [2, 0]]),
        }
    return vision


def write_model(folder: Path, config: dict[str, Any], seed: int) -> str:
    """Weights by transformers for this config.json; why it takes none, or "" ."""
    declare_torchvision_ops()
    from transformers import AutoConfig

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_config(folder, config, for_transformers=True)
    try:
        hf_config = AutoConfig.from_pretrained(folder)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            model = _auto_class(config).from_config(hf_config, dtype=torch.float32)
            for name, tensor in model.state_dict().items():
                if tensor.dim() > 1 and "visual" not in name:
                    tensor.mul_(_WEIGHT_SCALE)
                if tensor.is_floating_point():
                    tensor.add_(torch.randn_like(tensor) * _VECTOR_NOISE)
        model.save_pretrained(folder)
        # An old or a foreign writer leaves a copy of what is tied.
        if seed % 3 == 0 and bool(getattr(model.config, "tie_word_embeddings", False)):
            _add_head(folder, differs=seed % 2 == 0)
    except Exception as error:  # whatever transformers stumbles over, it does not compute this model
        return f"{type(error).__name__}: {error}"
    finally:
        write_config(folder, config)
    return ""


def write_config(folder: Path, config: dict[str, Any], *, for_transformers: bool = False) -> None:
    """config.json; ``for_transformers`` with the type as which transformers reads the family's files."""
    read_as = families()[config["model_type"]].read_as if for_transformers else ""
    (folder / "config.json").write_text(json.dumps({**config, "model_type": read_as or config["model_type"]}))


def of_transformers(folder: Path, config: dict[str, Any], unusable: str, compute: Callable[[], _Found]) -> tuple[_Found | None, str]:
    """The result of ``compute``, which reads ``folder`` with transformers, and why there is none; ``unusable``: known before."""
    if unusable:
        return None, unusable
    write_config(folder, config, for_transformers=True)
    try:
        return compute(), ""
    except Exception as error:  # as in write_model
        return None, f"{type(error).__name__}: {error}"
    finally:
        write_config(folder, config)


def judge(folder: Path, unusable: str, compute: Callable[[], dict[str, float]], bounds: dict[str, float]) -> Verdict:
    """The verdict on what ``compute`` finds, differences to transformers, which computes nothing if ``unusable`` says why.

    A refusal is a UserError of one line that names the folder.
    """
    by_both = "refused by transformers" if unusable else "refused"
    try:
        found = compute()
    except UserError as error:
        message = str(error)
        fits = str(folder) in message and "\n" not in message
        return Verdict(by_both if fits else "WRONG", message.replace(str(folder), ""))
    except Exception as error:
        # Without weights there is nothing to load.
        is_known = unusable and isinstance(error, (ValueError, RuntimeError, FileNotFoundError))
        return Verdict(by_both, unusable) if is_known else Verdict("WRONG", f"{type(error).__name__}: {error}")
    if unusable:
        return Verdict(by_both, unusable)
    wrong = [name for name, bound in bounds.items() if not found[name] <= bound]
    return Verdict("WRONG" if wrong else "same", ", ".join(wrong), found)


def _add_head(folder: Path, *, differs: bool) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    (embedding,) = (tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    tensors["lm_head.weight"] = embedding.clone() * (1.5 if differs else 1.0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _auto_class(config: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM


def reference_logprobs(folder: Path, config: dict[str, Any]) -> tuple[PackedBatch, Tensor]:
    """A pack, and transformers' log-prob of each of its tokens where the mask is set, else 0.

    Raises what transformers does, and ValueError for log-probs that are not finite.
    """
    model = (
        _auto_class(config)
        .from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager")
        .eval()
    )
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        if has_vision(config):
            batch = make_vision_batch(model.config.vision_config)
            logits = hf_logits(model, batch)
            logits[:, list(vision_token_ids(model.config))] = -torch.inf
        else:
            lengths = [9, 1, 40, 17]
            sequences = [torch.randint(3, config["vocab_size"], (length,), generator=generator) for length in lengths]
            batch = pack(sequences)
            logits = torch.cat([model(tokens[None]).logits[0] for tokens in sequences])
    mask = batch.fields.get("mask")
    if mask is None:
        mask = torch.ones(len(batch.tokens), dtype=torch.bool)
        mask[batch.cu_seqlens[:-1]] = False
        batch.fields["mask"] = mask
    logprobs = torch.zeros(len(batch.tokens))
    places = mask.nonzero()[:, 0]
    logprobs[places] = logits[places - 1].log_softmax(-1).gather(1, batch.tokens[places, None])[:, 0]
    if not logprobs.isfinite().all():
        raise ValueError("log-probs are not finite")
    return batch, logprobs


def engine_logprobs(folder: Path, batch: PackedBatch) -> Tensor:
    """The Engine's, on one rank. Raises what the Engine does."""
    parallel = ParallelConfig()
    ranks = topology.initialize(parallel, seed=1)
    try:
        engine = Engine("policy", folder, parallel=parallel, topology=ranks, optimizer=None, dtype=Dtype.float32)
        (logprobs,) = engine.logprobs([batch])
        return logprobs
    finally:
        topology.destroy()


def verdict(folder: Path, family: str, seed: int) -> Verdict:
    """The Engine's log-probs in float32 against transformers'."""
    config = odd_config(family, seed)
    expected, unusable = of_transformers(folder, config, write_model(folder, config, seed), lambda: reference_logprobs(folder, config))
    any_batch = pack([torch.arange(3, 9)]).with_fields(mask=torch.tensor([False, *[True] * 5]))
    batch, logprobs = expected or (any_batch, torch.zeros(6))

    def compare() -> dict[str, float]:
        return {"log-probs": (engine_logprobs(folder, batch) - logprobs).abs().max().item()}

    return judge(folder, unusable, compare, {"log-probs": ATOL})


def report(verdict: Callable[[Path, str, int], Verdict], first: int, last: int, of: tuple[str, ...]) -> None:
    """Print a line per model, then each family's counts, largest differences and reasons of refusals."""
    with tempfile.TemporaryDirectory() as scratch:
        for family in of:
            counts, reasons = collections.Counter[str](), collections.Counter[str]()
            largest: dict[str, float] = {}
            for seed in range(first, last):
                result, details, found = verdict(Path(scratch) / "model", family, seed)
                counts[result] += 1
                largest |= {name: max(value, largest.get(name, 0.0)) for name, value in found.items()}
                if "refused" in result:
                    reasons[re.sub(r"\d+(\.\d+)?", "N", details.splitlines()[0])[:100]] += 1
                print(family, seed, result, {name: f"{value:.1e}" for name, value in found.items()} or "", details[:160], flush=True)
            print(family, dict(counts), {name: f"{value:.1e}" for name, value in largest.items()})
            for reason, number in reasons.most_common():
                print(f"  {number:4d} {reason}", flush=True)


if __name__ == "__main__":  # python -m tests.odd_models FIRST LAST [family ...]
    report(verdict, int(sys.argv[1]), int(sys.argv[2]), tuple(sys.argv[3:]) or FAMILIES)
