"""Checks a run's inputs before it starts: prompts, mixtures, reward types, environment, profiled stages."""

from megatron_rl.config.schema import Config
from megatron_rl.errors import ConfigError, DataError


def check_rl_inputs(config: Config) -> None:
    """Check data rows, rewards with their options, and the environment, for commands that generate responses."""
    from megatron_rl.config.derived import model_has_vision
    from megatron_rl.data.prompts import check_files
    from megatron_rl.data.sampler import check_mixtures
    from megatron_rl.rewards.router import check_types

    check_eval_inputs(config)
    _check_profiled_stages(config)
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


def _check_profiled_stages(config: Config) -> None:
    from megatron_rl.config.schedule_facts import facts_of
    from megatron_rl.schedule.graph import Resource
    from megatron_rl.schedule.table import make_graph

    known = [stage.name for stage in make_graph(facts_of(config)) if stage.resource is Resource.trainer]
    unknown = [name for name in config.profile.stages if name not in known]
    if unknown:
        raise ConfigError(f"profile.stages: expected trainer stages of this run ({', '.join(known)}), got {', '.join(unknown)}")


def check_eval_inputs(config: Config) -> None:
    """Same as ``check_rl_inputs``, but without prompts to train on."""
    from megatron_rl.config.derived import eval_sets, model_has_vision
    from megatron_rl.data.prompts import check_files
    from megatron_rl.environments import environment_registry as environments
    from megatron_rl.rewards.router import check_types, routes_of

    routes_of(config.reward)
    if config.environment.name:
        environments.build(config.environment.name, config.environment.options)
    for eval_set in eval_sets(config).values():
        num_by_type = check_files(
            eval_set.files, config.data, with_response=False, takes_images=model_has_vision(config)
        )
        check_types(config.reward, num_by_type)
