"""`megatron-rl sft`: train a policy on reference responses, as a supervised warm start."""

import argparse
from typing import TYPE_CHECKING

from megatron_rl.commands import add_rank_recipe_arguments, print_dry_run
from megatron_rl.system.processes.gc_pauses import gc_disabled

if TYPE_CHECKING:
    from megatron_rl.config.schema import Config

add_arguments = add_rank_recipe_arguments


def run(arguments: argparse.Namespace) -> int:
    with gc_disabled():
        from megatron_rl.run.launch import run_on_ranks

    return run_on_ranks("sft", arguments, check_inputs=_check_inputs, print_plan=print_dry_run, work=_work)


def _check_inputs(config: "Config", *, all_rows: bool) -> list[str]:
    from megatron_rl.config.derived import model_has_vision
    from megatron_rl.data.prompts import check_files, load_solutions
    from megatron_rl.step.input_checks import first_text, load_tokenizer

    files = config.sft.train_files or config.data.train_files
    num_by_type = check_files(files, config.data, with_response=True, takes_images=model_has_vision(config))
    tokenizer = load_tokenizer(config)
    solutions = load_solutions(files, config.data, tokenizer, all_rows=all_rows)
    prompt_ids, response_ids, _ = solutions[0]
    lengths = [len(prompt) + len(response) for prompt, response, _ in solutions]
    return [
        f"rows to train on: {sum(num_by_type.values()):,}, of which {len(solutions):,} were tokenized (--all-rows: all); the longest "
        f"has {max(lengths):,} tokens",
        first_text(f"first row, {len(prompt_ids):,} + {len(response_ids):,} tokens", [*prompt_ids, *response_ids], tokenizer),
    ]


def _work(config: "Config") -> None:
    from megatron_rl.supervised.fine_tuning import sft

    sft(config)
