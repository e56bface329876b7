"""Checks of the models: layouts over the ranks, learning rates, precision, expert routing; and support of the model in policy.path."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.config.checks.data_settings import references
from megatron_rl.config.checks.servers import quantization_problems
from megatron_rl.config.derived import critic_dtype, is_served, policy_model, shares_devices
from megatron_rl.config.layout import (
    critic_layout,
    expert_tensor_size,
    experts_problem,
    layers_problem,
    layout_problems,
    of_critic,
    unsplit_problem,
)
from megatron_rl.config.schema import (
    Config,
    DecayStyle,
    Dtype,
    Fp8,
    Init,
    LoadBalancing,
    LoraConfig,
    LoraSync,
    MoeConfig,
    Moments,
    Mtp,
    OldPolicy,
    OptimizerConfig,
    ParallelConfig,
    RoutingReplay,
    VisionConfig,
    WeightUpdate,
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


def parallel_problems(config: Config, world_size: int | None) -> Iterator[str]:
    parallel = config.parallel
    ranks = world_size if world_size is not None else parallel.num_ranks
    if world_size is not None and parallel.num_ranks not in (0, world_size):
        yield (
            f"parallel.num_ranks: the configuration requests {parallel.num_ranks} ranks, but the launcher started {world_size}; "
            "start as many (launch/torchrun.sh: RANKS_PER_NODE), or set parallel.num_ranks=0 to use the launcher's number"
        )
    yield from layout_problems(parallel, ranks)
    own = config.critic.parallel
    if own is None:
        return
    if own.num_ranks not in (0, parallel.num_ranks):
        yield (
            f"critic.parallel.num_ranks: the critic uses the policy's ranks, parallel.num_ranks={parallel.num_ranks}; "
            f"leave it at 0, got {own.num_ranks}"
        )
    yield from (of_critic(problem) for problem in layout_problems(own, ranks))


def context_problems(config: Config) -> Iterator[str]:
    """Refuse more context-parallel ranks than the longest sequence has tokens for: each rank trains two parts of it."""
    longest = config.batch.max_prompt_tokens + config.batch.max_response_tokens
    for key, parallel in (("parallel", config.parallel), ("critic.parallel", config.critic.parallel)):
        if parallel and 2 * parallel.context_parallel_size > longest:
            yield (
                f"{key}.context_parallel_size: {parallel.context_parallel_size} ranks would split a sequence into "
                f"{2 * parallel.context_parallel_size} parts, and the longest has {longest} tokens (batch.max_prompt_tokens + "
                f"batch.max_response_tokens); set at most {longest // 2}"
            )


def learning_rate_problems(config: Config, command: str) -> Iterator[str]:
    in_use: dict[str, OptimizerConfig] = {
        "train": {"policy.optimizer": config.policy.optimizer, "critic.optimizer": config.critic.optimizer},
        "sft": {"sft.optimizer": config.sft.optimizer},
        "critic-pretrain": {"critic_pretrain.optimizer": config.critic_pretrain.optimizer},
        "reward-train": {"reward_train.optimizer": config.reward_train.optimizer},
        "dpo": {"dpo.optimizer": config.dpo.optimizer},
    }.get(command, {})
    for key, optimizer in in_use.items():
        if optimizer.min_lr > optimizer.lr:
            yield f"{key}.min_lr: expected a number from 0 to lr={optimizer.lr}, got {optimizer.min_lr}"
        if optimizer.decay_style is not DecayStyle.constant and optimizer.decay_steps <= optimizer.warmup_steps:
            yield (
                f"{key}.decay_steps: decay_style={optimizer.decay_style.value} needs more decay_steps than "
                f"warmup_steps={optimizer.warmup_steps}, got {optimizer.decay_steps}"
            )


def policy_problems(config: Config) -> Iterator[str]:
    policy, moe = config.policy, config.policy.moe
    if policy.fp8 is not Fp8.none and policy.dtype is not Dtype.bfloat16:
        yield (
            f"policy.fp8={policy.fp8.value}: needs parameters in bfloat16, got policy.dtype={policy.dtype.value}; set "
            "policy.dtype=bfloat16"
        )
    for name, optimizer, dtype in (
        ("policy", policy.optimizer, policy.dtype),
        ("critic", config.critic.optimizer, critic_dtype(config)),
    ):
        if optimizer.moments is Moments.bfloat16 and dtype is not Dtype.bfloat16:
            yield (
                f"{name}.optimizer.moments=bfloat16: needs parameters in bfloat16, got {name}.dtype={dtype.value}; set "
                f"{name}.dtype=bfloat16 or moments=float32"
            )
    if policy.mtp is Mtp.keep and policy.init is Init.random:
        yield "policy.mtp=keep: random weights (policy.init=random) have no layers to keep; set it to drop"
    yield from _load_balancing(moe)
    if moe.routing_replay is RoutingReplay.R2 and config.algorithm.correction.old_policy is OldPolicy.rollout:
        yield (
            "policy.moe.routing_replay=R2: records in the pass for the old log-probs, which "
            "algorithm.correction.old_policy=rollout skips; use recomputed, or R3"
        )


def lora_problems(config: Config, command: str) -> Iterator[str]:
    yield from _lora_sections(config)
    policy = config.policy
    if policy.lora.rank and command == "reward-train":
        yield "policy.lora.rank: reward models train all weights; set 0"
    if policy.lora.path and command in SERVED_COMMANDS and command not in RL_COMMANDS:
        yield (
            f"policy.lora.path: {command} reads policy.path alone; merge the adapters (megatron-rl convert --to hf), name the "
            "merged folder in policy.path, and set lora.path empty"
        )
    if not policy.lora.rank:
        return
    if policy.lora.sync is LoraSync.adapters:
        yield from _adapter_sync(config)
    if policy.fp8 is not Fp8.none:
        yield f"policy.fp8={policy.fp8.value}: not supported with policy.lora; set fp8=none or lora.rank=0"
    if policy.moe.load_balancing is not LoadBalancing.none:
        yield (
            f"policy.moe.load_balancing={policy.moe.load_balancing.value}: routers are frozen with policy.lora; set load_balancing=none "
            "or lora.rank=0"
        )


def _lora_sections(config: Config) -> Iterator[str]:
    critic = config.critic
    for name, model in (("policy", config.policy), ("critic", critic)):
        if model.lora.path and not model.lora.rank:
            yield f"{name}.lora.path: adapters have a rank; set {name}.lora.rank to the folder's r"
        if model.lora.path and not Path(model.lora.path, "adapter_config.json").is_file():
            yield f"{name}.lora.path: {model.lora.path} has no adapter_config.json; give a folder that peft or this trainer has written"
        if model.lora.rank and not model.lora.targets:
            yield f"{name}.lora.targets: adapters need at least one target; set all-linear, or {name}.lora.rank=0 for none"
        if model.lora.rank and model.megatron.get("moe_shared_expert_overlap"):
            yield f"{name}.megatron.moe_shared_expert_overlap: not supported with {name}.lora; remove it"
    if critic.lora.rank and critic.freeze:
        yield "critic.freeze: with critic.lora.rank all weights but the adapters and the value head are frozen; remove freeze"


def _adapter_sync(config: Config) -> Iterator[str]:
    """Problems of servers that get adapters alone."""
    merged = "set policy.lora.sync=merged"
    if config.schedule.weight_update is WeightUpdate.in_flight:
        yield f"policy.lora.sync=adapters: SGLang keeps a running request on its adapter (schedule.weight_update=in_flight); {merged}"
    if shares_devices(config.rollout):
        yield f"policy.lora.sync=adapters: not supported for servers on the trainer's devices (rollout.placement=colocated); {merged}"
    if any("speculative" in name.replace("-", "_") for name in config.rollout.server_args):
        yield f"policy.lora.sync=adapters: a draft model has no adapters (rollout.server_args); {merged}"


def _load_balancing(moe: MoeConfig) -> Iterator[str]:
    if (moe.aux_loss_coef > 0) != (moe.load_balancing is LoadBalancing.aux_loss):
        yield (
            f"policy.moe.aux_loss_coef: got {moe.aux_loss_coef} with load_balancing={moe.load_balancing.value}; "
            "load_balancing=aux_loss needs a coefficient above 0 (0.001 is in use), everything else 0"
        )
    if moe.bias_update_rate > 0 and moe.load_balancing is not LoadBalancing.bias:
        yield (
            f"policy.moe.bias_update_rate: got {moe.bias_update_rate} with load_balancing={moe.load_balancing.value}; "
            "only load_balancing=bias moves the expert bias"
        )


def folder_problems(config: Config, command: str, *, on_cpu: bool = False) -> Iterator[str]:
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
    if lora.rank > model.get("hidden_size", lora.rank):
        yield f"{name}.lora.rank: expected at most hidden_size={model['hidden_size']} of {path}, or 0 (all weights train), got {lora.rank}"
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
