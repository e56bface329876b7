"""Checks of the models' settings: layouts over the ranks, learning rates, precision, expert routing."""

from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.derived import critic_dtype, shares_devices
from megatron_rl.config.layout import layout_problems, of_critic
from megatron_rl.config.schema import (
    Config,
    DecayStyle,
    Dtype,
    Fp8,
    Init,
    LoadBalancing,
    LoraSync,
    MoeConfig,
    Moments,
    Mtp,
    OldPolicy,
    OptimizerConfig,
    RoutingReplay,
    WeightUpdate,
)
from megatron_rl.config.schema.commands import RL_COMMANDS, SERVED_COMMANDS


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
