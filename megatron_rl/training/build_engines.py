"""The models of a run, each as an engine on this rank."""

from dataclasses import replace
from typing import Any

from megatron_rl.config.derived import critic_dtype, needs_critic, needs_reference
from megatron_rl.config.layout import critic_layout
from megatron_rl.config.schema import (
    Config,
    CriticConfig,
    Init,
    Mtp,
    OptimizerConfig,
    PolicyConfig,
    RoutingReplay,
)
from megatron_rl.families.parameters import Role
from megatron_rl.parallel import topology as topologies
from megatron_rl.parallel.topology import Topology
from megatron_rl.training.engine import Engine
from megatron_rl.training.trainer_ranks import BuildEngines


def rl_engines(config: Config, *, freeze_policy: bool = False) -> BuildEngines:
    """The models of a run by name: policy and, as the algorithm needs them, critic, reference and process reward model.

    A folder named for one of them is loaded whatever policy.init says.
    """

    def build(topology: Topology) -> dict[str, Engine]:
        policy, critic = config.policy, config.critic
        critics = topology
        if needs_critic(config) or config.reward.process.path:
            critics = topologies.add_layout(critic_layout(config), seed=config.run.seed)
        trained = None if freeze_policy else policy.optimizer
        engines: dict[str, Engine] = {}

        def add(name: str, engine: Engine) -> None:
            engine.offload()  # room for the next one
            engines[name] = engine

        add("policy", build_engine(config, topology, "policy", policy, trained))
        if needs_critic(config):
            add("critic", build_engine(config, critics, "critic", critic, critic.optimizer, path=critic.path))
        if needs_reference(config):
            # The reference chooses its own experts: their routes are part of what it would have said.
            own_choice = replace(policy, mtp=Mtp.drop, moe=replace(policy.moe, routing_replay=RoutingReplay.none))
            add("reference", build_engine(config, topology, "policy", own_choice, None, path=config.reference.path))
        if config.reward.process.path:
            add("process", build_engine(config, critics, "critic", critic, None, path=config.reward.process.path))
        return engines

    return build


def build_engine(
    config: Config,
    topology: Topology,
    role: Role,
    model: PolicyConfig | CriticConfig,
    optimizer: OptimizerConfig | None,
    *,
    path: str = "",
) -> Engine:
    """``path``: a folder of its own; empty: policy.path, and fresh weights if policy.init says so."""
    return Engine(
        role,
        path or config.policy.path,
        parallel=critic_layout(config) if role == "critic" else config.parallel,
        topology=topology,
        optimizer=optimizer,
        init=Init.checkpoint if path else config.policy.init,
        dtype=model.dtype if isinstance(model, PolicyConfig) else critic_dtype(config),
        recompute=model.recompute,
        offload=model.offload,
        vision=model.vision,
        megatron=model.megatron,
        **(_policy_settings(model) if isinstance(model, PolicyConfig) else {}),
        seed=config.run.seed,
    )


def _policy_settings(policy: PolicyConfig) -> dict[str, Any]:
    """Settings that a policy has in addition to those of a critic."""
    return {"moe": policy.moe, "fp8": policy.fp8, "fp32_head": policy.fp32_head, "mtp": policy.mtp}
