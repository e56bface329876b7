"""Starts the trainer ranks of a run, the driver on rank 0 and the others serving it, and builds their models."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.config.derived import critic_dtype, critic_shares_base, needs_critic, reference_folders, shares_base
from megatron_rl.config.layout import critic_layout
from megatron_rl.config.schema import (
    Config,
    CriticConfig,
    Init,
    LoraConfig,
    Mtp,
    OptimizerConfig,
    PolicyConfig,
    RoutingReplay,
)
from megatron_rl.families.parameters import Role
from megatron_rl.parallel import collectives
from megatron_rl.parallel import topology as topologies
from megatron_rl.parallel.topology import Topology
from megatron_rl.system.processes import process_probe, run_processes
from megatron_rl.system.processes.gc_pauses import gc_disabled
from megatron_rl.system.processes.signals import StopSignals, die_with_parent, leave_signals_to_the_driver
from megatron_rl.training.engine import Engine
from megatron_rl.training.trainer_group import TrainerGroup
from megatron_rl.training.trainer_rank import TrainerRank

BuildEngines = Callable[[Topology], Mapping[str, Engine]]


@contextmanager
def trainer_ranks(
    config: Config, build_engines: BuildEngines, signals: StopSignals | None = None
) -> Iterator[TrainerGroup | None]:
    """Yield the group on rank 0; the other ranks serve until the driver stops them, then yield None.

    ``signals``: the driver's signal handling in a run, which has an output folder for the list of processes.
    """
    # A rank without its launcher would hold its device until a collective times out.
    die_with_parent()
    is_driver = os.environ.get("RANK", "0") == "0"
    process_probe.enable_probe(f"trainer rank {os.environ.get('RANK', '0')}")
    folder = Path(config.run.output_dir) if signals is not None else None
    signals = signals or StopSignals(config.run.stop_grace_s)
    # Only the driver decides when a run stops; the other ranks learn it from its next call.
    with signals.handling_signals() if is_driver else nullcontext():
        topology = topologies.initialize(config.parallel, seed=config.run.seed)
        try:
            register_processes(topology, folder)
            with gc_disabled():
                rank = TrainerRank(config, topology, build_engines(topology))
            if topology.rank != 0:
                leave_signals_to_the_driver()
                rank.serve()
                yield None
                return
            group = TrainerGroup(rank)
            yield group
            # Not after an error: a rank that waits inside a collective would not receive the call.
            group.stop()
        finally:
            topologies.destroy()


def register_processes(topology: Topology, folder: Path | None) -> None:
    """Write the list of the ranks' processes to the run's folder, and reply to `doctor --hang`; None: do neither. Collective."""
    everybody = collectives.gather_objects(run_processes.this_process(topology.rank), what="which processes the ranks are")
    if folder is None:
        return
    if everybody:
        run_processes.write_members(folder, everybody)
    # One process per node replies for all ranks of its node.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        run_processes.serve_probes(folder)


def rl_engines(config: Config, *, freeze_policy: bool = False) -> BuildEngines:
    """The models of a run by name: policy and, as the algorithm needs them, critic, reference and process reward model.

    A model with its own folder is loaded from there, regardless of policy.init.
    """

    def build(topology: Topology) -> dict[str, Engine]:
        policy, critic = config.policy, config.critic
        critics = topology
        if needs_critic(config) or config.reward.process.path:
            critics = topologies.add_layout(critic_layout(config), seed=config.run.seed)
        trained = None if freeze_policy else policy.optimizer
        engines: dict[str, Engine] = {}

        def add(name: str, engine: Engine) -> None:
            engine.offload()  # frees the device for the next model
            engines[name] = engine

        add("policy", build_engine(config, topology, "policy", policy, trained))
        if needs_critic(config):
            base = engines["policy"] if critic_shares_base(config) else None
            add("critic", build_engine(config, critics, "critic", critic, critic.optimizer, path=critic.path, base=base))
        # References choose their own experts, because their log-probs depend on them.
        own_moe = replace(policy.moe, routing_replay=RoutingReplay.none)
        if shares_base(config):
            engines["reference"] = engines["policy"].as_base(own_moe)
        for name, folder in reference_folders(config).items():
            is_start = name == "reference" and not config.reference.path
            frozen = replace(policy, mtp=Mtp.drop, lora=policy.lora if is_start else LoraConfig(), moe=own_moe)
            add(name, build_engine(config, topology, "policy", frozen, None, path="" if is_start else folder))
        if config.reward.process.path:
            whole = replace(critic, lora=LoraConfig())
            add("process", build_engine(config, critics, "critic", whole, None, path=config.reward.process.path))
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
    base: Engine | None = None,
) -> Engine:
    """``path``: the model's own folder; empty: policy.path, with random weights if policy.init says so. ``base``: as in ``Engine``."""
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
        lora=model.lora,
        base=base,
        **(_policy_settings(model) if isinstance(model, PolicyConfig) else {"frozen": model.freeze}),
        seed=config.run.seed,
    )


def _policy_settings(policy: PolicyConfig) -> dict[str, Any]:
    """Settings that a policy has in addition to those of a critic."""
    return {"moe": policy.moe, "fp8": policy.fp8, "fp32_head": policy.fp32_head, "mtp": policy.mtp}
