"""`megatron-rl reward-train`: train a reward model on preferences or line labels."""

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_rl.commands import add_rank_recipe_arguments, print_dry_run
from megatron_rl.errors import ConfigError
from megatron_rl.system.processes.gc_pauses import gc_disabled

if TYPE_CHECKING:
    from megatron_rl.config.schema import Config
    from megatron_rl.data.tokenizer import Tokenizer
    from megatron_rl.supervised.reward_models import RewardExample

add_arguments = add_rank_recipe_arguments


def run(arguments: argparse.Namespace) -> int:
    with gc_disabled():
        from megatron_rl.run.launch import run_on_ranks

    return run_on_ranks("reward-train", arguments, check_inputs=_check_inputs, print_plan=print_dry_run, work=_work)


def _check_inputs(config: "Config", *, all_rows: bool) -> list[str]:
    from megatron_rl.config.schema import RewardModelKind
    from megatron_rl.data.preferences import check_reward_files
    from megatron_rl.step.input_checks import load_tokenizer
    from megatron_rl.supervised.reward_models import build_kind
    from megatron_rl.supervised.reward_training import load_examples

    check_reward_files(config)
    settings = config.reward_train
    if settings.kind is RewardModelKind.pairwise and config.data.system_prompt:
        raise ConfigError("data.system_prompt: a judge gets no system message; leave this key empty")
    tokenizer = load_tokenizer(config)
    examples, notes = load_examples(config, build_kind(config, tokenizer), "reward-train")
    return [*notes, *describe_examples(examples, (settings.train_files, settings.eval_files), tokenizer)]


def describe_examples(
    parts: "Sequence[Sequence[RewardExample]]", files: Sequence[Sequence[str]], tokenizer: "Tokenizer"
) -> Iterator[str]:
    """Lines on the examples of each list of files."""
    from megatron_rl.step.input_checks import first_text

    for examples, names in zip(parts, files, strict=True):
        if examples:
            yield f"{', '.join(names)}: {len(examples):,} examples"
            first = examples[0].sequences[0]
            yield first_text(f"first example, {len(first):,} tokens", first, tokenizer)


def _work(config: "Config") -> None:
    from megatron_rl.supervised.reward_training import reward_train

    reward_train(config)
