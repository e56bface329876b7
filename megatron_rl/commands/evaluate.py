"""`megatron-rl evaluate`: measure the accuracy of policies on data.eval_files or eval.sets, on servers that start once.

    megatron-rl evaluate --config recipe.yaml --policies outputs/run/policies/* eval.num_samples=4

The results are written to evaluation.json in each folder. A folder that was already measured with the same
settings is skipped, so a killed command can be repeated and continues from there.
"""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from megatron_rl.commands import add_recipe_arguments
from megatron_rl.errors import DataError
from megatron_rl.system.command_line.terminal import say, show
from megatron_rl.system.files.hub_cache import find_download
from megatron_rl.system.processes.signals import clean_stop


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument(
        "--policies", required=True, nargs="+", metavar="FOLDER", help="policies to measure: Hugging Face folders of one architecture"
    )


def run(arguments: argparse.Namespace) -> int:
    from megatron_rl.config.checks import check_config
    from megatron_rl.config.load import load_config
    from megatron_rl.run.output import check_machine, os_errors_with_keys
    from megatron_rl.step.input_checks import preview_eval_inputs
    from megatron_rl.system.files.probes import probe_folder

    # argparse assigns everything after --policies to it, including key=value.
    names = [word for word in arguments.policies if "=" not in word or Path(word).exists()]
    overrides = [*arguments.overrides, *(word for word in arguments.policies if word not in names)]
    folders = [Path(find_download(word, "model")) for word in names]
    if not folders:
        raise DataError("--policies: expected at least one Hugging Face folder, got none")
    config = load_config(arguments.config, [*overrides, f"policy.path={folders[0]}", "policy.init=checkpoint"])
    with os_errors_with_keys(config):
        check_config(config, command="evaluate")
        _check_architecture(folders)
        check_machine(config, "evaluate")
        for folder in folders:
            probe_folder("--policies", folder)
        notes = preview_eval_inputs(config, all_rows=arguments.all_rows)
    from megatron_rl.step.evaluate_policies import evaluate_policies, missing_evaluations

    missing = missing_evaluations(config, folders)
    if len(missing) < len(folders):
        say(f"{len(folders) - len(missing)} of {len(folders)} policies have been measured with these settings already")
    if arguments.dry_run:
        show(*notes)
        say(f"dry run: {len(missing)} policies would be measured; nothing was started")
    elif missing:
        from megatron_rl.run.checkpoints import policy_exports
        from megatron_rl.tracking.console import evaluation_text
        from megatron_rl.tracking.sinks.all_trackers import tracked_evaluation

        # Only folders that the recipe's run has exported have a known step.
        steps = {kept.folder.resolve(): kept.step for kept in policy_exports(config.run.output_dir)}
        kept_by_run = any(folder.resolve() in steps for folder in missing)
        with clean_stop(), tracked_evaluation(config, say) if kept_by_run else nullcontext() as tracker:
            for number, (folder, metrics) in enumerate(evaluate_policies(config, missing, say), start=1):
                say(f"{number}/{len(missing)} {folder}: accuracy {evaluation_text(metrics)}")
                if tracker is not None and folder.resolve() in steps:
                    tracker.log(steps[folder.resolve()], metrics)
    return 0


def _check_architecture(folders: Sequence[Path]) -> None:
    """Raise DataError for a folder without config.json, or whose config.json differs from the first folder's.

    Raises WeightsError for tensors that do not fit the folder's own config.json.
    """
    from megatron_rl.models.hf.model_config import load_hf_config
    from megatron_rl.models.hf.weights import checked_source

    first = None
    for folder in folders:
        if not (folder / "config.json").is_file():
            raise DataError(f"--policies: {folder} has no config.json; expected a Hugging Face model folder")
        config = load_hf_config(folder)
        checked_source(config, folder, "policy")
        described = config.to_dict() | {"_name_or_path": ""}
        first = first or described
        differing = [key for key in sorted({*first, *described}) if first.get(key) != described.get(key)]
        if differing:
            raise DataError(
                f"--policies: {folder} is another architecture than {folders[0]} ({', '.join(differing)} in config.json); "
                "measure them with separate commands"
            )
