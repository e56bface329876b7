"""Settings of the policy's model that exclude each other."""

from collections.abc import Iterator

from megatron_rl.config.derived import critic_dtype
from megatron_rl.config.schema import (
    Config,
    Dtype,
    Fp8,
    Init,
    LoadBalancing,
    MoeConfig,
    Moments,
    Mtp,
    OldPolicy,
    RoutingReplay,
)


def problems(config: Config) -> Iterator[str]:
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
        yield "policy.mtp=keep: fresh weights (policy.init=random) have no layers to keep; set it to drop"
    yield from _load_balancing(moe)
    if moe.routing_replay is RoutingReplay.R2 and config.algorithm.correction.old_policy is OldPolicy.rollout:
        yield (
            "policy.moe.routing_replay=R2: records in the pass for the old log-probs, which "
            "algorithm.correction.old_policy=rollout leaves out; use recomputed, or R3"
        )


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
