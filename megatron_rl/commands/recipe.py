"""What commands share that take a recipe: their arguments, the checks before anything starts, the start of the ranks."""

import argparse
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from megatron_rl.commands.model_checks import check_models
from megatron_rl.config.checks import check_config
from megatron_rl.config.checks.servers import LOOPBACK
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import Config
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.system.collector import collector_at_rest
from megatron_rl.system.signals import StopRequested, stopped_by_signals

_CHECKED = "MEGATRON_RL_INPUTS_ARE_CHECKED"
"""Set for the ranks by the process that has read all data files before it started them."""
_LOOPBACK_INTERFACE = "lo"


def add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, action="append", help="YAML recipe; a later one overrides")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done and exit")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the recipe")


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """``key=value`` words as options; values are read as YAML, dots nest."""
    from omegaconf import OmegaConf

    options = OmegaConf.to_container(OmegaConf.from_dotlist(list(words)))
    return {str(key): value for key, value in options.items()} if isinstance(options, dict) else {}


def run_on_ranks(
    command: str,
    arguments: argparse.Namespace,
    *,
    check_inputs: Callable[[Config], None],
    work: Callable[[Config], None],
    writes_output_dir: bool = False,
) -> int:
    """Check the recipe, then do ``work`` on every rank; where no launcher has made them, torchrun is started for them.

    ``writes_output_dir``: it is a run with checkpoints, which goes on later when a signal stops it.
    ``check_inputs`` looks at everything outside the recipe that a run would trip over later. It is called once, by the
    process that the user started or by rank 0 of an outer launcher.
    """
    try:
        with stopped_by_signals():
            return _run_on_ranks(command, arguments, check_inputs, work, goes_on=writes_output_dir)
    except StopRequested as stop:
        if writes_output_dir:
            raise
        # Nothing of it can be continued, so a scheduler that tries again would do so forever.
        raise KeyboardInterrupt from stop


def _run_on_ranks(
    command: str,
    arguments: argparse.Namespace,
    check_inputs: Callable[[Config], None],
    work: Callable[[Config], None],
    *,
    goes_on: bool,
) -> int:
    config = load_config(arguments.config, arguments.overrides)
    is_rank = "RANK" in os.environ
    world_size = int(os.environ["WORLD_SIZE"]) if is_rank else None
    with collector_at_rest():  # the checks import half of what a run needs
        check_config(config, command=command, world_size=world_size)
        if os.environ.get("RANK", "0") == "0" and _CHECKED not in os.environ:
            _check_megatron_fields(config)
            check_models(config, command)
            check_inputs(config)
    if arguments.dry_run:
        from megatron_rl.commands.dry_run import print_plan

        print_plan(config, command=command, world_size=world_size or config.parallel.num_ranks or 1)
        return 0
    if goes_on:
        from megatron_rl.run.output import check_output_dir

        check_output_dir(config)
    _stay_on_this_machine(config)
    if not is_rank and config.parallel.num_ranks > 1:
        from megatron_rl.system.torchrun import run_under_torchrun

        recipes = [f"--config={path}" for path in arguments.config]
        os.environ[_CHECKED] = "1"
        try:
            return run_under_torchrun(config.parallel.num_ranks, [command, *recipes, *arguments.overrides])
        finally:
            del os.environ[_CHECKED]
    work(config)
    return 0


def _stay_on_this_machine(config: Config) -> None:
    """Where all ranks and servers are here, gloo listens here only; else it takes the interface of the host's name."""
    one_machine = os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")
    addresses = [config.rollout.host, *(urlsplit(url).hostname for url in config.rollout.urls)]
    if one_machine and set(addresses) <= set(LOOPBACK) and _LOOPBACK_INTERFACE in dict(socket.if_nameindex()).values():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK_INTERFACE)


def _check_megatron_fields(config: Config) -> None:
    """``policy.megatron`` and ``critic.megatron``, against the Megatron that is installed; imported only if they are set."""
    if not (config.policy.megatron or config.critic.megatron):
        return
    try:
        from megatron_rl.models.megatron_fields import checked_fields
    except ImportError as error:
        raise ConfigError(
            f"policy.megatron, critic.megatron: their fields cannot be checked, for Megatron Core cannot be imported: {error}"
        ) from error
    checked_fields(config.policy.megatron, key="policy.megatron")
    checked_fields(config.critic.megatron, key="critic.megatron")


def check_rl_inputs(config: Config) -> None:
    """Data rows, the rewards and their options, the environment: of the commands that generate responses."""
    from megatron_rl.config.derived import model_has_vision
    from megatron_rl.data.prompts import check_files
    from megatron_rl.data.sampler import check_mixtures
    from megatron_rl.rewards.router import check_types

    check_eval_inputs(config)
    data = config.data
    num_by_type = check_files(data.train_files, data, with_response=False, takes_images=model_has_vision(config))
    check_mixtures(data.mixture, data.curriculum, num_by_type)
    check_types(config.reward, num_by_type)
    unknown = set(config.batch.num_samples_by_type) - {*num_by_type, *config.reward.by_type}
    if unknown:
        raise DataError(
            f"batch.num_samples_by_type: no prompt has the type {', '.join(map(repr, sorted(unknown)))}; the types in "
            f"data.train_files are {', '.join(map(repr, sorted(num_by_type)))}"
        )


def check_eval_inputs(config: Config) -> None:
    """The same without prompts to train on."""
    from megatron_rl.config.derived import eval_sets, model_has_vision
    from megatron_rl.data.prompts import check_files
    from megatron_rl.environments import by_name as environments
    from megatron_rl.rewards.router import check_types, routes_of

    routes_of(config.reward)
    if config.environment.name:
        environments.build(config.environment.name, config.environment.options)
    for eval_set in eval_sets(config).values():
        num_by_type = check_files(
            eval_set.files, config.data, with_response=False, takes_images=model_has_vision(config)
        )
        check_types(config.reward, num_by_type)
