"""What must hold before anything starts. Every problem is found at once, with key and remedy.

What one field can say alone (a bound) stands at the field in the schema; here stands what holds between fields, files
and models: one module per subject, whose functions yield one message per problem.
"""

from megatron_rl.config.checks import (
    combinations,
    eval_sampling,
    layouts,
    learning_rates,
    model_folder,
    paths,
    policy_settings,
    prompt_content,
    servers,
    tracking_keys,
)
from megatron_rl.config.checks.servers import Node
from megatron_rl.config.schema import Config
from megatron_rl.config.schema.bounds import bound_problems, type_problems
from megatron_rl.config.schema.commands import RL_COMMANDS, SERVED_COMMANDS
from megatron_rl.errors import ConfigError


def check_config(config: Config, *, command: str, world_size: int | None = None, node: Node | None = None) -> None:
    """Raise ConfigError listing every problem of ``config`` for a command of the command line, such as ``train``.

    ``world_size`` None: the number of ranks is not known yet (a dry run outside a launcher). ``node``: the driver's; None:
    nothing is known of it.
    """
    unusable = list(type_problems(config))
    if unusable:
        raise ConfigError("\n".join(unusable))
    out_of_bounds = list(bound_problems("", config))
    problems = [
        *out_of_bounds,
        *learning_rates.problems(config, command),
        *paths.problems(config, command),
    ]
    problems += [*prompt_content.problems(config.data), *layouts.problems(config, world_size)]
    problems += [*servers.address_problems(config.rollout), *policy_settings.problems(config)]
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
        problems += [] if unknown else combinations.problems(config, command)
        problems += [*eval_sampling.problems(config), *tracking_keys.problems(config), *combinations.profile_problems(config, ranks)]
    if not problems and config.policy.path:
        problems += model_folder.problems(config, command)
    if problems:
        # A layout's own check repeats what is out of bounds in it.
        raise ConfigError("\n".join(dict.fromkeys(problems)))
