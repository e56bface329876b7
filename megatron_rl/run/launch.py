"""Code shared by commands that run on ranks: checks before anything starts, and the start of the ranks."""

import argparse
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from urllib.parse import urlsplit

from megatron_rl.config.checks import check_config
from megatron_rl.config.checks.servers import Node
from megatron_rl.config.derived import key_in, pretraining_folder, uses_attached_servers
from megatron_rl.config.layout import fewest_ranks
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import Config, RolloutConfig
from megatron_rl.errors import ConfigError
from megatron_rl.models.hf.megatron_config import check_models
from megatron_rl.run.output import check_machine, check_output_dir, check_outputs, os_errors_with_keys
from megatron_rl.system.command_line.terminal import say
from megatron_rl.system.gpu.gpu_environment import REQUIRE_GPU, check_required_gpus, count_gpus, set_gpu_defaults
from megatron_rl.system.http.addresses import LOOPBACK, local_interface_for
from megatron_rl.system.processes.gc_pauses import gc_disabled
from megatron_rl.system.processes.signals import StopRequested, stopped_by_signals

PrintPlan = Callable[[Config, str, int, Sequence[str]], None]
"""Prints the dry run of a command: configuration, the command's name, world size, lines on its inputs."""
CheckInputs = Callable[..., Sequence[str]]
"""Checks everything outside the recipe that a command reads: (configuration, all_rows) to lines for the dry run."""
_CHECKED = "MEGATRON_RL_INPUTS_ARE_CHECKED"
"""Environment variable for the ranks: set once their parent process has checked all data files."""
_LOOPBACK_INTERFACE = "lo"


def run_on_ranks(
    command: str,
    arguments: argparse.Namespace,
    *,
    check_inputs: CheckInputs,
    print_plan: PrintPlan,
    work: Callable[[Config], None],
    writes_output_dir: bool = False,
) -> int:
    """Check the recipe, then run ``work`` on every rank; without a launcher, torchrun starts the ranks.

    ``writes_output_dir``: the command is a run with checkpoints, which can resume after a signal stops it. Inputs and
    outputs are checked once, for a run and for its dry run by the same functions: by the process that the user started,
    or by rank 0 of an outer launcher. ``print_plan`` prints the dry run.
    """
    try:
        with stopped_by_signals():
            return _run_on_ranks(command, arguments, check_inputs, print_plan, work, is_resumable=writes_output_dir)
    except StopRequested as stop:
        if writes_output_dir:
            raise
        # The work cannot be resumed, so a scheduler that retries it would do so forever.
        raise KeyboardInterrupt from stop


def _run_on_ranks(
    command: str,
    arguments: argparse.Namespace,
    check_inputs: CheckInputs,
    print_plan: PrintPlan,
    work: Callable[[Config], None],
    *,
    is_resumable: bool,
) -> int:
    config = load_config(arguments.config, arguments.overrides)
    if command == "critic-pretrain":
        config.run.output_dir = pretraining_folder(config.run.output_dir)
    is_rank = "RANK" in os.environ
    world_size = int(os.environ["WORLD_SIZE"]) if is_rank else None
    with gc_disabled(), os_errors_with_keys(config):  # the checks import half of what a run needs
        node = driver_node(config, arguments, world_size)
        check_config(config, command=command, world_size=world_size, node=node)
        if is_resumable:
            check_output_dir(config)
        notes: Sequence[str] = ()
        if os.environ.get("RANK", "0") == "0" and _CHECKED not in os.environ:
            check = partial(check_inputs, config, all_rows=arguments.all_rows)
            starts_ranks = not (is_rank or arguments.dry_run or node.num_gpus)
            notes = _check_outside(config, command, check, starts_ranks=starts_ranks, is_elsewhere=bool(arguments.gpus_per_node))
    if arguments.dry_run:
        print_plan(config, command, world_size or config.parallel.num_ranks or fewest_ranks(config), notes)
        return 0
    if not is_rank and not config.parallel.num_ranks and fewest_ranks(config) > 1:
        raise ConfigError(
            f"parallel.num_ranks: the layout needs {fewest_ranks(config)} ranks and one would start here; set "
            f"parallel.num_ranks={fewest_ranks(config)} or a multiple, or start the ranks with launch/torchrun.sh"
        )
    prepare_gpus(is_rank)
    choose_interface(config)
    if not is_rank and config.parallel.num_ranks > 1:
        from megatron_rl.system.processes.torchrun import run_under_torchrun

        recipes = [f"--config={path}" for path in arguments.config]
        # The ranks inherit this variable and skip the checks.
        os.environ[_CHECKED] = "1"
        try:
            return run_under_torchrun(config.parallel.num_ranks, [command, *recipes, *arguments.overrides])
        finally:
            del os.environ[_CHECKED]
    work(config)
    return 0


def _check_outside(config: Config, command: str, check_inputs: Callable[[], Sequence[str]], **machine: bool) -> Sequence[str]:
    """Check what a command finds outside the recipe: packages, hosts, cores, folders, models, data. Returns lines on the data.

    ``machine``: see ``check_machine``.
    """
    _check_megatron_fields(config)
    check_machine(config, command, **machine)
    check_outputs(config, command)
    check_models(config, command)
    return check_inputs()


def driver_node(config: Config, arguments: argparse.Namespace, world_size: int | None) -> Node:
    """GPUs and ranks on the driver's node. A dry run takes them from --gpus-per-node; other nodes' ranks return zeros."""
    if arguments.gpus_per_node and not arguments.dry_run:
        raise ConfigError("--gpus-per-node is for --dry-run: a run counts the GPUs of its node")
    num_ranks = world_size or config.parallel.num_ranks or 1
    num_gpus = arguments.gpus_per_node or count_gpus()
    if os.environ.get("GROUP_RANK", "0") != "0":
        return Node(0, 0)
    if "LOCAL_WORLD_SIZE" in os.environ and not arguments.gpus_per_node:
        return Node(num_gpus, int(os.environ["LOCAL_WORLD_SIZE"]))
    # Without a launcher all ranks of a run start here. A dry run, or ranks of srun, have one per GPU on each node.
    starts_here = world_size is None and not arguments.dry_run
    return Node(num_gpus, num_ranks) if starts_here else Node.of(num_gpus, num_ranks)


def prepare_gpus(is_rank: bool) -> None:
    """Set up the process before CUDA is used. Raises UserError if a GPU is required and none is found."""
    import torch

    num_gpus = torch.cuda.device_count()
    check_required_gpus(num_gpus)
    if num_gpus:
        set_gpu_defaults()
    elif torch.version.cuda and "CUDA_VISIBLE_DEVICES" not in os.environ and not is_rank:
        # Warn about a driver that does not respond, or a container without its GPUs: both would silently train on CPUs.
        say(f"note: torch is built for CUDA {torch.version.cuda}, but finds no GPU: this computes on CPUs ({REQUIRE_GPU}=1 refuses to)")


def _attached_urls(rollout: RolloutConfig) -> list[str]:
    """URLs of attached servers; empty without any, and while the file or service that lists them is not available yet."""
    if not uses_attached_servers(rollout):
        return []
    from megatron_rl.rollout.sglang.process.attached_server import attached_urls

    with contextlib.suppress(OSError):  # the source of the URLs is not up yet
        return attached_urls(rollout.urls, rollout.urls_file, key_in(rollout.api_key_env))
    return []


def choose_interface(config: Config) -> None:
    """Choose the interface that gloo listens on: loopback if all ranks and servers are on this node.

    With several nodes gloo would use the address of the host name, which many Linux systems map to 127.0.1.1.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    driver, world_size = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("WORLD_SIZE", "1")
    # A launcher without LOCAL_WORLD_SIZE starts all ranks on this node if their rendezvous is at loopback.
    if world_size != os.environ.get("LOCAL_WORLD_SIZE", world_size if driver in LOOPBACK else "1"):
        others = [driver]
    else:
        hosts = [urlsplit(url).hostname or "" for url in _attached_urls(config.rollout)]
        others = [host for host in hosts if host not in LOOPBACK]
    if others:
        interface = local_interface_for(others[0])
    else:
        is_local =  config.rollout.host in LOOPBACK and _LOOPBACK_INTERFACE in dict(socket.if_nameindex()).values()
        interface = _LOOPBACK_INTERFACE if is_local else ""
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def _check_megatron_fields(config: Config) -> None:
    """Check ``policy.megatron`` and ``critic.megatron`` against the installed Megatron; imported only if they are set."""
    if not (config.policy.megatron or config.critic.megatron):
        return
    try:
        from megatron_rl.models.megatron_fields import checked_fields
    except ImportError as error:
        raise ConfigError(
            f"policy.megatron, critic.megatron: their fields cannot be checked, because Megatron Core cannot be imported: {error}"
        ) from error
    checked_fields(config.policy.megatron, key="policy.megatron")
    checked_fields(config.critic.megatron, key="critic.megatron")


