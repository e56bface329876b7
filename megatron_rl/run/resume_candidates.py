"""Finds the checkpoint that a run resumes from, judged by its files only, before Megatron is imported."""

from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.schema import Config
from megatron_rl.errors import UserError
from megatron_rl.run import checkpoint_folder as folders
from megatron_rl.run.checkpoint_folder import DamagedCheckpoint


def candidates(checkpoints: Path) -> list[Path]:
    """Checkpoints that a run may resume from, newest first: the folder in latest.json, and folders with a manifest.

    All other folders are incomplete.
    """
    try:
        latest = folders.latest_folder(checkpoints)
    except DamagedCheckpoint:
        latest = None
    return [f for f in folders.saved_folders(checkpoints) if f == latest or (f / "manifest.json").exists()]


def check_resume(config: Config) -> None:
    """Raise UserError if run.resume=true has no usable checkpoint, judged by names and sizes before anything starts."""
    checkpoints = Path(config.run.output_dir) / "checkpoints"
    if config.run.resume is not True:
        return
    saved = candidates(checkpoints)
    if not saved:
        raise UserError(
            f"run.resume: {checkpoints} contains no complete checkpoint; run.resume=auto starts the run and resumes if "
            "there is one, run.overwrite=true starts over (deletes what is there), or point run.output_dir at the run "
            "to continue"
        )
    folders.latest_folder(checkpoints)
    models = [path.name for path in saved[0].iterdir() if path.is_dir()]
    try:
        folders.check_folder(saved[0], models)
        folders.read_driver(saved[0])
    except DamagedCheckpoint as error:
        raise UserError(f"{error}\n{resume_hint(checkpoints, saved[0], models)}") from error


def resume_hint(checkpoints: Path, refused: Path, models: Sequence[str]) -> str:
    """Hint for the error about ``refused``: an older checkpoint to resume from, or how to start over."""
    for folder in candidates(checkpoints):
        if folders.num_steps_of(folder) < folders.num_steps_of(refused):
            try:
                folders.check_folder(folder, list(models))
            except DamagedCheckpoint:
                continue
            return f"{folder.name} is complete: run.resume=auto resumes from it"
    return "no older checkpoint is left; run.overwrite=true starts over (deletes what is there)"
