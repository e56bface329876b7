"""Locks and prepares a run's output folder, and removes an earlier run's files on request.

``first_prompts.json`` in the folder has the tokens of some prompts at the run's start, to detect later changes of the
tokenizer or its chat template.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_rl.config.schema import Config
from megatron_rl.data.trajectory import Prompt
from megatron_rl.errors import UserError
from megatron_rl.run.checkpoint_folder import check_resume
from megatron_rl.system.files.atomic_files import lock_file, remove_unfinished, write_atomic

_LOCK = ".lock"
"""File that every run makes first, and that stays."""
_MAX_NAMED = 5
_RUN_FILES = (
    "metrics.jsonl", "timeline.json", "status.json", "report.html", "summary.json", "config.yaml", "mlflow_run.json",
    "samples", "tensorboard", "wandb", "wandb_run.json", "profile",
    "checkpoints", "policies", "policy", "first_prompts.json", "rolled_back_*",
)  # fmt: skip
"""Patterns of files that a run leaves; the MLflow store stays, because it may contain other runs."""


def check_output_dir(config: Config) -> None:
    """Raise UserError if the folder has another run and neither run.resume nor run.overwrite allows changing it."""
    folder = Path(config.run.output_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"run.output_dir: {folder} is a file; give a folder")
    if config.run.resume and config.run.overwrite:
        raise UserError("run.resume, run.overwrite: one continues a run and the other deletes it; set only one of them")
    check_resume(config)
    has_run = (folder / "metrics.jsonl").exists()
    if not (config.run.resume or has_run or (folder / _LOCK).exists()) and (foreign := _foreign_files(folder)):
        raise UserError(
            f"run.output_dir: {folder} has files that no run wrote ({', '.join(foreign)}), among which this run would write and "
            "delete its own; give a new or an empty folder"
        )
    if config.run.resume or config.run.overwrite or not has_run:
        return
    raise UserError(
        f"run.output_dir: {folder} already contains a run; continue it with run.resume=true (run.resume=auto, if it may have "
        "no checkpoint yet), start over with run.overwrite=true (deletes it), or give another folder"
    )


def _foreign_files(folder: Path) -> list[str]:
    """Return names in ``folder``, where no run has been, that exclude a run: names of a run's own files; in the working folder, any."""
    is_here = folder.resolve() in (Path.cwd(), *Path.cwd().parents)
    found = folder.glob("*") if is_here else (path for pattern in (*_RUN_FILES, "agents", "weights") for path in folder.glob(pattern))
    return sorted(path.name for path in found if not path.name.startswith("."))[:_MAX_NAMED]


@contextmanager
def lock_output_dir(config: Config) -> Iterator[Path]:
    """Lock the folder for this process until it ends, and yield it.

    With run.overwrite the files of an earlier run are removed. Unfinished exports of a killed run are removed
    always.
    """
    check_output_dir(config)
    folder = Path(config.run.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _LOCK, "w") as lock:
        lock_file(lock, folder)
        lock.write(str(os.getpid()))
        lock.flush()
        if config.run.overwrite:
            for path in [path for pattern in _RUN_FILES for path in folder.glob(pattern)]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        remove_unfinished(folder, "policy")
        remove_unfinished(folder / "policies", "step-*")
        yield folder


_FIRST_PROMPTS = "first_prompts.json"
_NUM_FIRST_PROMPTS = 16


def write_first_prompts(folder: Path, prompts: Sequence[Prompt]) -> None:
    """Write ``first_prompts.json`` unless it exists, which makes it the record of the run's first start. Raises OSError."""
    if not (folder / _FIRST_PROMPTS).exists():
        write_atomic(folder / _FIRST_PROMPTS, json.dumps({p.source or p.id: list(p.token_ids) for p in prompts[:_NUM_FIRST_PROMPTS]}))


def read_first_prompts(folder: Path) -> dict[str, list[int]]:
    """Read the recorded prompts: token ids by source (file:line) or id of the prompt; empty if the file is missing or invalid."""
    try:
        recorded = json.loads((folder / _FIRST_PROMPTS).read_text())
    except (OSError, ValueError):
        return {}
    return recorded if isinstance(recorded, dict) else {}
