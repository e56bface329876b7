"""Checks that the trainer, its layouts and SGLang support the model in policy.path."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.config.checks.data_settings import references
from megatron_rl.config.checks.servers import quantization_problems
from megatron_rl.config.derived import is_served, policy_model
from megatron_rl.config.layout import (
    critic_layout,
    expert_tensor_size,
    experts_problem,
    layers_problem,
    of_critic,
    unsplit_problem,
)
from megatron_rl.config.schema import (
    Config,
    LoadBalancing,
    LoraConfig,
    LoraSync,
    MoeConfig,
    ParallelConfig,
    VisionConfig,
)
from megatron_rl.config.schema.commands import RL_COMMANDS, SERVED_COMMANDS
from megatron_rl.errors import ConfigError, ModelError
from megatron_rl.families.adapters import SERVED_FAMILIES, adapted_linears
from megatron_rl.families.family import ModelConfig, families, family_of
from megatron_rl.families.model_facts import (
    as_config,
    expert_ffn_size,
    is_supported,
    num_experts,
    read_json_object,
    uses_only_experts,
)
from megatron_rl.families.parameters import frozen_parameters
from megatron_rl.families.sglang_limits import cpu_problems, engine_problems, split_problems


def problems(config: Config, command: str, *, on_cpu: bool = False) -> Iterator[str]:
    """Yield the reasons why trainer or servers do not support the model. ``on_cpu``: the run starts its servers on a CPU."""
    path = Path(config.policy.path) / "config.json"
    model = policy_model(config)
    model_type = model.get("model_type")
    family = families()[str(model_type)] if is_supported(model_type) else None
    if family is None:
        yield f"policy.path: {path}: model_type {model_type!r} is not supported; supported are {', '.join(families())}"
        return
    tokens = _tokens(path.parent / "tokenizer.json", "policy.path")
    yield from _lengths(config, command, model, path, max(tokens, default=-1))
    if command in SERVED_COMMANDS:
        yield from engine_problems(model, path)
        yield from cpu_problems(model, path) if on_cpu else ()
        yield from split_problems(model, config.rollout.tensor_parallel_size, path)
    if command in RL_COMMANDS:
        yield from quantization_problems(config.rollout.server_args, model_type)
    yield from moe_problems(config.policy.moe, as_config(model), path)
    for name, settings in (("policy", config.policy.vision), ("critic", config.critic.vision)):
        if family.vision is None and settings != VisionConfig():
            yield f"{name}.vision: {model_type} ({path}) has no vision encoder; leave both settings true"
    if command in RL_COMMANDS:
        yield from _other_tokens(config, tokens)
        served = [key for key, reference in references(config).items() if is_served(reference)]
        if family.vision is not None and served:
            yield f"{served[0]}: a server gets tokens, and no images of {model_type}; give the reference's folder"
    yield from _frozen(config.critic.freeze, model, path)
    for name, lora, layout in (
        ("policy", config.policy.lora, config.parallel),
        ("critic", config.critic.lora, critic_layout(config)),
    ):
        yield from _adapters(name, lora, layout, model, path)
    yield from _divisions(config.parallel, model, path)
    if config.critic.parallel:
        yield from (of_critic(problem) for problem in _divisions(config.critic.parallel, model, path))


def _lengths(config: Config, command: str, model: dict[str, Any], path: Path, largest: int) -> Iterator[str]:
    """Yield a problem for a token id outside the vocabulary, and for prompt plus response longer than the model's context.

    ``largest``: the tokenizer's largest token id; -1 if it is unknown.
    """
    if largest >= model.get("vocab_size", largest + 1):
        yield (
            f"policy.path: vocabulary mismatch: the largest id in {path.parent / 'tokenizer.json'} is {largest}, but {path} "
            f"has vocab_size={model['vocab_size']}; use the tokenizer that belongs to this checkpoint"
        )
    tokens = {"stop_token_ids": config.rollout.stop_token_ids, "fire.banned_token_ids": config.rollout.fire.banned_token_ids}
    for key, token_ids in tokens.items():
        if token_ids and max(token_ids) >= model.get("vocab_size", max(token_ids) + 1):
            yield f"rollout.{key}: {max(token_ids)} is not in the vocabulary of {model['vocab_size']} tokens ({path})"
    context = model.get("max_position_embeddings", 0)
    longest = config.batch.max_prompt_tokens + config.batch.max_response_tokens
    if context and longest > context and command in (*RL_COMMANDS, "evaluate", "select-prompts"):
        yield (
            f"batch.max_prompt_tokens + batch.max_response_tokens: {longest} tokens do not fit the model's context of "
            f"{context} ({path}: max_position_embeddings)"
        )


def _divisions(parallel: ParallelConfig, model: dict[str, Any], path: Path) -> Iterator[str]:
    """Yield the sizes of the model that the sizes of the layout do not divide."""
    tp = parallel.tensor_parallel_size
    names = ["num_attention_heads", "num_key_value_heads", "linear_num_key_heads"]
    facts = as_config({"num_hidden_layers": 0, **model})
    if not uses_only_experts(facts):
        names.append("intermediate_size")
    for name in names:
        if model.get(name) and model[name] % tp:
            yield f"parallel.tensor_parallel_size: {tp} does not divide {name}={model[name]} of {path}"
    problem = layers_problem(parallel, model["num_hidden_layers"]) if "num_hidden_layers" in model else None
    if problem:
        yield f"parallel.pipeline_parallel_size: {problem} ({path})"
    experts = experts_problem(parallel, num_experts(facts), expert_ffn_size(facts))
    for problem in (experts, unsplit_problem(parallel, family_of(facts).unsplit)):
        if problem:
            yield f"parallel: the {problem} ({path})"


def moe_problems(moe: MoeConfig, config: ModelConfig, where: object) -> Iterator[str]:
    """Yield a message for each setting that the model ``config`` does not support; ``where``: its name in messages."""
    experts = family_of(config).experts
    if experts is None or not num_experts(config):
        for name, value in (("load_balancing", moe.load_balancing), ("routing_replay", moe.routing_replay)):
            if value.value != "none":
                yield f"policy.moe.{name}={value.value}: needs a mixture-of-experts model, and {where} is dense; set it to none"
    elif moe.load_balancing is LoadBalancing.bias and not experts.has_bias:
        yield (
            f"policy.moe.load_balancing=bias: the routers of {config.model_type} have no expert bias ({where}); use "
            "aux_loss or none"
        )


def _frozen(patterns: list[str], model: dict[str, Any], path: Path) -> Iterator[str]:
    try:
        frozen_parameters(as_config(model), "critic", patterns) if patterns else ()
    except ModelError as error:
        yield f"critic.freeze: {error} ({path})"


def _adapters(name: str, lora: LoraConfig, layout: ParallelConfig, model: dict[str, Any], path: Path) -> Iterator[str]:
    if not lora.rank:
        return
    try:
        linears = adapted_linears(as_config(model), lora.targets, lora.rank)
    except ModelError as error:
        yield f"{name}.lora.targets: {error} ({path})"
        return
    if name == "policy" and lora.sync is LoraSync.adapters and model["model_type"] not in SERVED_FAMILIES:
        yield (
            f"policy.lora.sync=adapters: only adapters of {', '.join(SERVED_FAMILIES)} are served, and {path} is {model['model_type']}; "
            "set policy.lora.sync=merged"
        )
    if any(linear.is_expert for linear in linears) and expert_tensor_size(layout) > 1:
        section = "parallel" if name == "policy" else "critic.parallel"
        yield (
            f"{name}.lora.targets: adapters of routed experts need {section}.expert_tensor_parallel_size=1, got "
            f"{expert_tensor_size(layout)}; set it to 1, with {section}.expert_parallel_size above 1"
        )


def _other_tokens(config: Config, own: dict[int, str]) -> Iterator[str]:
    """Yield the references whose tokenizer is not the policy's, ``own``: the divergence is taken token by token."""
    for key, folder in references(config).items():
        other = _tokens(Path(folder) / "tokenizer.json", key) if folder else {}
        if differing := [token_id for token_id in sorted(own.keys() & other.keys()) if own[token_id] != other[token_id]]:
            first = differing[0]
            yield (
                f"{key}: the tokenizer of {folder} is another one: token {first} is {other[first]!r} there and {own[first]!r} in "
                f"{config.policy.path}, one of {len(differing):,} that differ; log-probs are compared token by token, so give a "
                "model with the policy's tokenizer"
            )


def _tokens(path: Path, key: str) -> dict[int, str]:
    """Map token ids to texts by tokenizer.json; empty if the file does not exist or lists its vocabulary in another form."""
    if not path.is_file():
        return {}
    try:
        tokenizer = read_json_object(path)
    except ModelError as error:
        raise ConfigError(f"{key}: {error}") from error
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    listed = isinstance(vocabulary, list)  # [[text, score], ...]
    found = dict(enumerate(row[0] for row in vocabulary)) if listed else {id_: text for text, id_ in vocabulary.items()}
    return found | {token["id"]: token["content"] for token in tokenizer.get("added_tokens", [])}
