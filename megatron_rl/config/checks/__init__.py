"""Checks a configuration before anything starts, and reports all problems together, with key and remedy.

The bound of a single field is at the field in the schema. The modules of this package check relations between
fields, files and models, one subject each; their functions yield one message per problem.
"""

from megatron_rl.config.checks import (
    combinations,
    data_settings,
    model_folder,
    model_settings,
    servers,
    tracking_keys,
)
from megatron_rl.config.checks.servers import Node
from megatron_rl.config.derived import uses_attached_servers
from megatron_rl.config.schema import Config
from megatron_rl.config.schema.bounds import bound_problems, type_problems
from megatron_rl.config.schema.commands import RL_COMMANDS, SERVED_COMMANDS
from megatron_rl.errors import ConfigError


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
        # Combinations compute with the values, which a bound may have refused.
        problems += [] if unknown or out_of_bounds else combinations.problems(config, command)
        problems += model_settings.context_problems(config)
        problems += [*data_settings.eval_problems(config), *tracking_keys.problems(config)]
        problems += tracking_keys.profile_problems(config, ranks)
    if not problems and config.policy.path:
        on_cpu = node is not None and node.num_ranks > 0 and not node.num_gpus and not uses_attached_servers(config.rollout)
        problems += model_folder.problems(config, command, on_cpu=on_cpu)
    if problems:
        # The check of a layout repeats the messages on its bounds.
        raise ConfigError("\n".join(dict.fromkeys(problems)))
