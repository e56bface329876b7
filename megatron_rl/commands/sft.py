"""`megatron-rl sft`: train a policy on reference responses, or on the assistant's turns of conversations."""

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
    import numpy as np

    from megatron_rl.config.derived import model_has_vision
    from megatron_rl.data.conversation_rows import check_supervised_files, load_sequences
    from megatron_rl.step.input_checks import first_text, load_tokenizer

    files = config.sft.train_files or config.data.train_files
    num_rows = check_supervised_files(files, config.data, takes_images=model_has_vision(config))
    tokenizer = load_tokenizer(config)
    sequences, notes = load_sequences(files, config.data, tokenizer, turns=config.sft.train_turns, all_rows=all_rows)
    first = sequences[0]
    trained = np.asarray(first.token_ids)[first.mask].tolist()
    return [
        f"rows to train on: {num_rows:,}; those that were tokenized (--all-rows: all) are {len(sequences):,} sequences, of which the "
        f"longest has {max(len(one.token_ids) for one in sequences):,} tokens",
        *notes,
        first_text(f"first sequence, {len(first.token_ids):,} tokens", first.token_ids, tokenizer),
        first_text(f"its {len(trained):,} trained tokens", trained, tokenizer),
    ]


def _work(config: "Config") -> None:
    from megatron_rl.supervised.fine_tuning import sft

    sft(config)
