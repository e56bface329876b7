"""Checks a configuration before anything starts, and reports all problems together, with key and remedy.

The bound of a single field is at the field in the schema. The modules of this package check relations between
fields, files and models, one subject each; their functions yield one message per problem.
"""

import netrc
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from megatron_rl.config.checks import combinations, data_settings, model_settings, servers
from megatron_rl.config.checks.servers import Node
from megatron_rl.config.derived import uses_attached_servers
from megatron_rl.config.schema import Config, WandbMode
from megatron_rl.config.schema.bounds import bound_problems, type_problems
from megatron_rl.config.schema.commands import RL_COMMANDS, SERVED_COMMANDS
from megatron_rl.errors import ConfigError
from megatron_rl.system.http.addresses import address_problem

_WANDB_SERVER = "https://api.wandb.ai"


def check_config(config: Config, *, command: str, world_size: int | None = None, node: Node | None = None) -> None:
    """Raise a ConfigError that lists every problem of ``config`` for ``command``, such as ``train``.

    ``world_size`` None: the number of ranks is not known yet (a dry run outside a launcher). ``node``: the driver's
    node; None: unknown.
    """
    unusable = list(type_problems(config))
    if unusable:
        raise ConfigError("\n".join(unusable))
    out_of_bounds = list(bound_problems("", config))
    problems = [
        *out_of_bounds,
        *model_settings.learning_rate_problems(config, command),
        *data_settings.path_problems(config, command),
        *data_settings.prompt_problems(config.data),
        *model_settings.parallel_problems(config, world_size),
        *servers.address_problems(config.rollout),
        *model_settings.policy_problems(config),
        *model_settings.lora_problems(config, command),
    ]
    unknown = list(combinations.unknown_plugins(config.algorithm))
    problems += unknown
    ranks = config.parallel.num_ranks if world_size is None else world_size
    if command in SERVED_COMMANDS:
        problems += servers.flag_problems(
            config.rollout.server_args, num_servers=config.rollout.num_servers, dtype=config.policy.dtype.value
        )
    if node is not None and not out_of_bounds:
        problems += servers.gpu_problems(config, node, ranks, command)
    if command in RL_COMMANDS:
        problems += [*servers.placement_problems(config.rollout, ranks), *servers.fleet_problems(config)]
        # Combinations divide by sizes of a batch, which a bound may have refused.
        is_countable = not any(problem.startswith("batch.") for problem in out_of_bounds)
        problems += combinations.problems(config, command) if is_countable and not unknown else []
        problems += model_settings.context_problems(config)
        problems += [*data_settings.eval_problems(config), *tracking_problems(config)]
        problems += profile_problems(config, ranks)
    if not problems and config.policy.path:
        on_cpu = node is not None and node.num_ranks > 0 and not node.num_gpus and not uses_attached_servers(config.rollout)
        problems += model_settings.folder_problems(config, command, on_cpu=on_cpu)
    if problems:
        # The check of a layout repeats the messages on its bounds.
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def tracking_problems(config: Config) -> Iterator[str]:
    """Check optional packages, and the account and address of a tracker."""
    tracking = config.tracking
    wanted = {"tensorboard": tracking.tensorboard, "wandb": tracking.wandb is not None}
    for package, is_wanted in wanted.items():
        if is_wanted and find_spec(package) is None:
            off = "false" if package == "tensorboard" else "null"
            yield (
                f"tracking.{package}: the package {package} is not installed; install it (pip install -e '.[{package}]'), or set "
                f"tracking.{package}={off}"
            )
    if tracking.wandb is WandbMode.online and find_spec("wandb") and not _has_wandb_account():
        yield (
            "tracking.wandb: online needs an account, and neither WANDB_API_KEY is set nor has `wandb login` stored a key on this "
            "machine; log in, or set tracking.wandb=offline and upload the run with `wandb sync` afterwards"
        )
    address = re.sub("//[^/@]*@", "//", tracking.mlflow_uri)  # MLflow accepts a user and a password
    if address.startswith(("http://", "https://")) and (problem := address_problem(address)):
        yield f"tracking.mlflow_uri: {problem}"
    if tracking.mlflow_model and not tracking.mlflow:
        yield "tracking.mlflow_model: a model is registered in MLflow, and tracking.mlflow=false; set it to true, or the name to ''"
    if tracking.mlflow_parent and not tracking.mlflow:
        yield "tracking.mlflow_parent: runs are nested in MLflow, and tracking.mlflow=false; set it to true, or the name to ''"


def profile_problems(config: Config, num_ranks: int) -> Iterator[str]:
    """Check profiled steps and ranks; ``num_ranks`` 0: not known yet."""
    profile = config.profile
    late = [step for step in profile.steps if step > config.run.num_steps]
    if late:
        yield f"profile.steps: the run has run.num_steps={config.run.num_steps} steps and does not reach {late}; give earlier steps"
    missing = [rank for rank in profile.ranks if rank >= num_ranks > 0] if profile.steps else []
    if missing:
        yield f"profile.ranks: there are {num_ranks} trainer ranks, counted from 0, so {missing} do not exist"
    if profile.memory and not profile.steps:
        yield "profile.memory: snapshots are taken in the steps of profile.steps, which is empty; give some, or set profile.memory=false"


def _has_wandb_account() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    if (Path.home() / ".config" / "wandb" / "settings").is_file():  # may contain the address of a private server
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or _WANDB_SERVER).hostname or ""
    try:
        file = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return host in file.hosts
