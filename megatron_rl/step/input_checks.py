"""Checks a run's inputs before it starts: prompts, mixtures, reward types, environment, profiled stages.

A run and its dry run call the same functions. ``check_...`` need no tokenizer; ``preview_...`` also render and tokenize
the first and last prompts with the functions of the run, and return lines that describe them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_rl.config.schema import Config
from megatron_rl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megatron_rl.data.prompts import PromptSet
    from megatron_rl.data.tokenizer import Tokenizer

_MAX_SHOWN = 2000
"""Characters of the prompt that a dry run shows."""


def preview_rl_inputs(config: Config, *, all_rows: bool) -> list[str]:
    """Check the inputs of a run. Returns lines on the prompts that train and evaluate, and the first prompt as text.

    ``all_rows`` False: only the first and last prompts are tokenized (``data.prompts.load_prompts``).
    """
    from megatron_rl.data.sampler import check_mixtures
    from megatron_rl.step.run_inputs import describe_prompts, eval_prompts, scored_prompts

    num_by_type = check_rl_inputs(config)
    tokenizer = _checked_tokenizer(config)
    eval_sets = eval_prompts(config, tokenizer, all_rows=all_rows)
    train_set = scored_prompts(config, config.data.train_files, tokenizer, all_rows=all_rows)
    num_rows, num_tokenized = sum(num_by_type.values()), len(train_set.prompts) + train_set.num_too_long
    if num_tokenized >= num_rows:
        check_mixtures(config.data.mixture, config.data.curriculum, train_set.num_by_type)
    unused = sorted(set(config.algorithm.kl.coef_by_type) - set(num_by_type))
    lost = [f"algorithm.kl.coef_by_type: no prompt has the type {', '.join(map(repr, unused))}"] if unused else []
    part = f"of {num_rows:,} rows to train on, the first and last {num_tokenized:,} were tokenized; --all-rows tokenizes all"
    notes = [*describe_prompts(train_set, eval_sets), *([part] if num_tokenized < num_rows else []), *lost]
    return [*notes, first_prompt(train_set, tokenizer)]


def preview_eval_inputs(config: Config, *, all_rows: bool) -> list[str]:
    """Same as ``preview_rl_inputs``, but without prompts to train on."""
    from megatron_rl.step.run_inputs import describe_prompts, eval_prompts

    check_eval_inputs(config)
    tokenizer = _checked_tokenizer(config)
    eval_sets = eval_prompts(config, tokenizer, all_rows=all_rows)
    first = next(iter(eval_sets.values()), None)
    return [*describe_prompts(None, eval_sets), *([first_prompt(first, tokenizer)] if first else [])]


def _checked_tokenizer(config: Config) -> "Tokenizer":
    """Load the policy's tokenizer, and check that it can write the environment's messages."""
    from megatron_rl.environments import base as environments
    from megatron_rl.rollout.generation import make_dialogue

    tokenizer = load_tokenizer(config)
    if config.environment.name:
        environment = environments.build(config.environment.name, config.environment.options)
        make_dialogue(environment, tokenizer, chat=config.data.use_chat_template)
    return tokenizer


def load_tokenizer(config: Config) -> "Tokenizer":
    """Load the policy's tokenizer. Raises DataError, which names policy.path."""
    from megatron_rl.data.tokenizer import Tokenizer

    try:
        return Tokenizer(config.policy.path)
    except DataError as error:
        raise DataError(f"policy.path: {error}") from error


def first_prompt(prompts: "PromptSet", tokenizer: "Tokenizer") -> str:
    """Return the first prompt as lines of a dry run (``first_text``)."""
    first = prompts.prompts[0]
    return first_text(f"first prompt ({first.source}), {len(first.token_ids):,} tokens", first.token_ids, tokenizer)


def first_text(title: str, token_ids: Sequence[int], tokenizer: "Tokenizer") -> str:
    """Return ``title`` and a text as the model reads it, with special tokens; control characters are written as escapes."""
    text = tokenizer.raw_text(token_ids)
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text[:_MAX_SHOWN])
    more = f" ... ({len(text):,} characters)" if len(text) > _MAX_SHOWN else ""
    return f"{title}:\n{shown}{more}"


def check_rl_inputs(config: Config) -> dict[str, int]:
    """Check data rows, rewards with their options, and the environment, for commands that generate responses.

    Returns the number of prompts to train on of each type.
    """
    from megatron_rl.config.derived import model_has_vision
    from megatron_rl.data.prompts import OPTIONAL_COLUMNS, check_files
    from megatron_rl.data.sampler import check_mixtures
    from megatron_rl.rewards.router import check_types

    check_eval_inputs(config)
    _check_profiled_stages(config)
    data = config.data
    takes_images = model_has_vision(config)
    num_by_type = check_files(data.train_files, data, takes_images=takes_images, unique_ids=True, columns=OPTIONAL_COLUMNS)
    check_mixtures(data.mixture, data.curriculum, num_by_type)
    check_types(config.reward, num_by_type)
    unknown = set(config.batch.num_samples_by_type) - {*num_by_type, *config.reward.by_type}
    if unknown:
        raise DataError(
            f"batch.num_samples_by_type: no prompt has the type {', '.join(map(repr, sorted(unknown)))}; the types in "
            f"data.train_files are {', '.join(map(repr, sorted(num_by_type)))}"
        )
    return num_by_type


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
    from megatron_rl.environments import base as environments
    from megatron_rl.rewards.router import check_types, routes_of

    routes_of(config.reward)
    if config.environment.name:
        environments.build(config.environment.name, config.environment.options)
    for eval_set in eval_sets(config).values():
        takes_images = model_has_vision(config)
        num_by_type = check_files(
            eval_set.files, eval_set.data_of(config.data), takes_images=takes_images, unique_ids=True
        )
        check_types(config.reward, num_by_type)
