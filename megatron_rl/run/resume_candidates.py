"""Which checkpoint a run goes on from, as far as files alone can tell: looked at before Megatron is imported."""

from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.schema import Config
from megatron_rl.errors import UserError
from megatron_rl.run import checkpoint_folder as folders
from megatron_rl.run.checkpoint_folder import DamagedCheckpoint


def candidates(checkpoints: Path) -> list[Path]:
    """What a run may go on from, newest first: what latest.json names, and what has a manifest.

    The rest was not written to its end.
    """
    try:
        latest = folders.latest_folder(checkpoints)
    except DamagedCheckpoint:
        latest = None
    return [f for f in folders.saved_folders(checkpoints) if f == latest or (f / "manifest.json").exists()]


def check_resume(config: Config) -> None:
    """UserError where run.resume=true has nothing to go on from, as far as names and sizes tell: before anything starts."""
    checkpoints = Path(config.run.output_dir) / "checkpoints"
    if config.run.resume is not True:
        return
    found = candidates(checkpoints)
    if not found:
        raise UserError(
            f"run.resume: {checkpoints} holds no complete checkpoint; run.resume=auto starts the run and goes on where "
            "there is one, run.overwrite=true starts over (deletes what is there), or point run.output_dir at the run "
            "to continue"
        )
    folders.latest_folder(checkpoints)
    models = [path.name for path in found[0].iterdir() if path.is_dir()]
    try:
        folders.check_folder(found[0], models)
        folders.read_driver(found[0])
    except DamagedCheckpoint as error:
        raise UserError(f"{error}\n{resume_hint(checkpoints, found[0], models)}") from error


def resume_hint(checkpoints: Path, refused: Path, models: Sequence[str]) -> str:
    """What to do about ``refused``, for its message."""
    for folder in candidates(checkpoints):
        if folders.num_steps_of(folder) < folders.num_steps_of(refused):
            try:
                folders.check_folder(folder, list(models))
            except DamagedCheckpoint:
                continue
            return f"{folder.name} is whole: run.resume=auto goes on from it"
    return "no older checkpoint is left; run.overwrite=true starts over (deletes what is there)"
