"""Whether the model's folder is one that this trainer, its layouts and SGLang take."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.config.checks.commands import RL_COMMANDS, SERVED_COMMANDS
from megatron_rl.config.derived import read_json, read_model_json
from megatron_rl.config.layout import experts_problem, layers_problem, of_critic
from megatron_rl.config.schema import Config, LoadBalancing, MoeConfig, ParallelConfig, VisionConfig
from megatron_rl.families.sglang_limits import engine_problems, split_problems

SUPPORTED_MODEL_TYPES = (
    "deepseek_v3",
    "glm4_moe",
    "llama",
    "mixtral",
    "qwen2",
    "qwen2_5_vl",
    "qwen3",
    "qwen3_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
)
"""The families of families/tables.py, which needs Megatron to be imported."""

_SPARSE_MODEL_TYPES = ("qwen3_moe", "qwen3_vl_moe")
"""Families whose layers all have experts, unless config.json says otherwise; their intermediate_size is not used then."""
_NUM_EXPERTS_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
"""How the families' config.json call the number of experts of a layer."""


def problems(config: Config, command: str) -> Iterator[str]:
    path = Path(config.policy.path) / "config.json"
    model = read_model_json(path)
    model_type = model.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        yield f"policy.path: {path}: model_type {model_type!r} is not supported; supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
        return
    yield from _lengths(config, command, model, path)
    if command in SERVED_COMMANDS:
        yield from engine_problems(model, path)
        yield from split_problems(model, config.rollout.tensor_parallel_size, path)
    yield from _moe(config.policy.moe, model, path)
    for name, settings in (("policy", config.policy.vision), ("critic", config.critic.vision)):
        if "vision_config" not in model and settings != VisionConfig():
            yield f"{name}.vision: {model_type} ({path}) has no vision encoder; leave both settings true"
    yield from _divisions(config.parallel, model, path)
    if config.critic.parallel:
        yield from (of_critic(problem) for problem in _divisions(config.critic.parallel, model, path))


def _lengths(config: Config, command: str, model: dict[str, Any], path: Path) -> Iterator[str]:
    """Of the vocabulary and of the context."""
    largest = _largest_token_id(path.parent / "tokenizer.json")
    if largest >= model.get("vocab_size", largest + 1):
        yield (
            f"policy.path: vocabulary mismatch: the largest id in {path.parent / 'tokenizer.json'} is {largest}, but {path} "
            f"says vocab_size={model['vocab_size']}; use the tokenizer that belongs to this checkpoint"
        )
    context = model.get("max_position_embeddings", 0)
    longest = config.batch.max_prompt_tokens + config.batch.max_response_tokens
    if context and longest > context and command in (*RL_COMMANDS, "select-prompts"):
        yield (
            f"batch.max_prompt_tokens + batch.max_response_tokens: {longest} tokens do not fit the model's context of "
            f"{context} ({path}: max_position_embeddings)"
        )


def _divisions(parallel: ParallelConfig, model: dict[str, Any], path: Path) -> Iterator[str]:
    """Sizes of the model that do not divide by those of the layout."""
    tp = parallel.tensor_parallel_size
    names = ["num_attention_heads", "num_key_value_heads"]
    is_sparse = model.get("model_type") in _SPARSE_MODEL_TYPES and not model.get("mlp_only_layers")
    if not (is_sparse and model.get("decoder_sparse_step", 1) == 1):
        names.append("intermediate_size")
    for name in names:
        if name in model and model[name] % tp:
            yield f"parallel.tensor_parallel_size: {tp} does not divide {name}={model[name]} of {path}"
    problem = layers_problem(parallel, model["num_hidden_layers"]) if "num_hidden_layers" in model else None
    if problem:
        yield f"parallel.pipeline_parallel_size: {problem} ({path})"
    num_experts = next((model[name] for name in _NUM_EXPERTS_FIELDS if model.get(name)), 0)
    problem = experts_problem(parallel, num_experts, model.get("moe_intermediate_size", 0))
    if problem:
        yield f"parallel: the {problem} ({path})"


def _moe(moe: MoeConfig, model: dict[str, Any], path: Path) -> Iterator[str]:
    text_model = model.get("text_config", model)
    if not any(text_model.get(name) for name in _NUM_EXPERTS_FIELDS):
        for name, value in (("load_balancing", moe.load_balancing), ("routing_replay", moe.routing_replay)):
            if value.value != "none":
                yield f"policy.moe.{name}={value.value}: needs an MoE model, and {path} is dense; set it to none"
    elif moe.load_balancing is LoadBalancing.bias and "topk_method" not in text_model and "n_group" not in text_model:
        yield (
            f"policy.moe.load_balancing=bias: the routers of {model.get('model_type')} have no expert bias ({path}); use "
            "aux_loss or none"
        )


def _largest_token_id(path: Path) -> int:
    """-1 where there is no tokenizer.json, or one of a kind that lists its vocabulary in another way."""
    if not path.is_file():
        return -1
    tokenizer = read_json(path)
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    size = len(vocabulary) - 1 if isinstance(vocabulary, list) else max(vocabulary.values(), default=-1)
    return max([size, *(token["id"] for token in tokenizer.get("added_tokens", []))])
