"""Loads the inputs of a run: its prompts, the slots that they fill, and the environment that replies to responses."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.config.derived import block_size, effective_window_tokens, eval_sets, needs_greedy, responses_per_group
from megatron_rl.config.schedule_facts import facts_of, window_jitter_tokens
from megatron_rl.config.schema import Config
from megatron_rl.data.prompts import PromptSet, load_prompts, with_reward_fields
from megatron_rl.data.sampler import PromptSampler
from megatron_rl.data.slots import SlotPool
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import POLICY, Prompt, Trajectory
from megatron_rl.environments.base import Environment
from megatron_rl.environments.base import build as build_environment
from megatron_rl.rewards.router import check_prompts, wanted_row_fields
from megatron_rl.rollout.generation import text_digest


@dataclass(frozen=True, kw_only=True)
class EvalInputs:
    """The inputs of an evaluation."""

    tokenizer: Tokenizer
    environment: Environment | None
    start: Callable[..., Trajectory]
    """Creates an empty response to a prompt, with the run's environment and budgets."""
    eval_sets: dict[str, PromptSet]
    """Maps set names to prompts; the set of data.eval_files has the empty name."""


@dataclass(frozen=True, kw_only=True)
class RunInputs(EvalInputs):
    train_set: PromptSet
    pool: SlotPool

    def go_on_from(self, pool: dict[str, Any]) -> None:
        """Restore the responses in progress from a checkpoint; their images must still be in the data."""
        self.pool.load_state(pool)
        if self.tokenizer.vision is not None:
            self.tokenizer.vision.check_known(image for prompt in self.pool.prompts for image in prompt.images)


def make_inputs(config: Config) -> RunInputs:
    held_out = make_eval_inputs(config)
    train_set = scored_prompts(config, config.data.train_files, held_out.tokenizer)
    return RunInputs(**vars(held_out), train_set=train_set, pool=_slot_pool(config, train_set, held_out.start))


def make_eval_inputs(config: Config) -> EvalInputs:
    """Load tokenizer, environment and the prompts to evaluate on, with every field that a reward reads."""
    tokenizer = Tokenizer(config.policy.path)
    environment = _environment(config)
    return EvalInputs(
        tokenizer=tokenizer,
        environment=environment,
        start=functools.partial(_new_trajectory, config, environment),
        eval_sets=eval_prompts(config, tokenizer),
    )


def eval_prompts(config: Config, tokenizer: Tokenizer, *, all_rows: bool = True) -> dict[str, PromptSet]:
    """Load the prompts of each evaluation set, with the set's own fields and instruction."""
    own = {name: (replace(config, data=one.data_of(config.data)), one.files) for name, one in eval_sets(config).items()}
    return {name: scored_prompts(one, files, tokenizer, all_rows=all_rows) for name, (one, files) in own.items()}


def scored_prompts(config: Config, files: Sequence[str], tokenizer: Tokenizer, *, all_rows: bool = True) -> PromptSet:
    """Load prompts with every field that a reward reads.

    ``all_rows`` as in ``load_prompts``. Raises DataError, and RewardError for prompts that their reward cannot score.
    """
    data = with_reward_fields(config.data, wanted_row_fields(config.reward))
    found = load_prompts(files, data, tokenizer, max_prompt_tokens=config.batch.max_prompt_tokens, all_rows=all_rows)
    check_prompts(config.reward, found.prompts)
    return found


def _environment(config: Config) -> Environment | None:
    if not config.environment.name:
        return None
    return build_environment(config.environment.name, config.environment.options)


def _new_trajectory(
    config: Config,
    environment: Environment | None,
    prompt: Prompt,
    id: int,
    *,
    group_id: int | None = None,
    sample_index: int = 0,
) -> Trajectory:
    """Create an empty response to a prompt, with the run's environment and budgets."""
    return Trajectory(
        id=id,
        prompt=prompt,
        group_id=id if group_id is None else group_id,
        sample_index=sample_index,
        max_response_tokens=config.batch.max_response_tokens,
        dialogue=environment is not None,
        max_turn_tokens=config.environment.max_turn_tokens if environment is not None else 0,
        next_role=environment.first_role() if environment is not None else POLICY,
    )


def first_window_tokens(config: Config, trajectory_id: int) -> int:
    """Return the most tokens of a response's first window (batch.window_jitter_tokens); 0 if it is like the others.

    The value depends on run.seed and the response alone, and not on the time or slot in which the response starts.
    """
    jitter = window_jitter_tokens(config)
    if not jitter:
        return 0
    draw = int.from_bytes(text_digest(f"{config.run.seed}/first window/{trajectory_id}"))
    return effective_window_tokens(config) - draw % jitter


def describe_prompts(train_set: PromptSet | None, eval_sets: Mapping[str, PromptSet]) -> Iterator[str]:
    """Yield one line per set of prompts: its number of prompts of each type, and the number skipped for each reason."""
    sets = {"train on": train_set} if train_set is not None else {}
    sets |= {f"evaluate on ({name})" if name else "evaluate on": one for name, one in eval_sets.items()}
    for purpose, prompts in sets.items():
        by_type = _by_type(prompts.num_by_type)
        too_long = "longer than batch.max_prompt_tokens"
        if any(prompts.num_too_long_by_type):
            too_long += f" ({_by_type(prompts.num_too_long_by_type)})"
        left_out = {too_long: prompts.num_too_long, "duplicate ids": prompts.num_duplicates}
        dropped = ", ".join(f"{count:,} {why}" for why, count in left_out.items() if count)
        yield f"prompts to {purpose}: {by_type}" + (f"; left out: {dropped}" if dropped else "")
        for name, count in prompts.num_unread.items():
            yield f"the chat template reads no {name!r}, which {count:,} prompts to {purpose} have: there it changes nothing"


def _by_type(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name or 'without type'}" for name, count in counts.items())


def _slot_pool(config: Config, train_set: PromptSet, start: Callable[..., Trajectory]) -> SlotPool:
    batch, data = config.batch, config.data
    num_samples, block, with_greedy = responses_per_group(config), block_size(batch), needs_greedy(config)

    def start_for_training(prompt: Prompt, id: int, *, group_id: int, sample_index: int) -> Trajectory:
        trajectory = start(prompt, id, group_id=group_id, sample_index=sample_index)
        trajectory.first_window_tokens = first_window_tokens(config, id)
        # A type may have more samples than num_samples_per_prompt, but then there is no greedy response.
        trajectory.greedy = with_greedy and sample_index >= batch.num_samples_per_prompt
        return trajectory

    num_started = batch.num_samples_per_prompt * math.ceil(batch.num_prompts_per_step * config.rollout.over_sampling)
    return SlotPool(
        PromptSampler(
            train_set.prompts,
            seed=config.run.seed,
            shuffle=data.shuffle,
            mixture=data.mixture,
            curriculum=data.curriculum,
        ),
        start_for_training,
        # A greedy response is added to the responses that train; all groups then have one size.
        num_slots=math.ceil(num_started / block) * (block + with_greedy),
        num_samples_per_prompt=num_samples,
        num_samples_by_type=batch.num_samples_by_type,
        holds_groups=facts_of(config).whole_groups,
    )
