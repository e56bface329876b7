"""Checks what a command finds outside its recipe (hosts, server lists, cores, folders); locks and prepares a run's output folder.

``first_prompts.json`` in the folder has the tokens of some prompts at the run's start, to detect later changes of the
tokenizer or its chat template.

A run and its dry run call the same checks, so that a dry run accepts nothing that the run refuses.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from megatron_rl.config.checks.data_settings import output_of
from megatron_rl.config.derived import uses_attached_servers
from megatron_rl.config.load import flat_params
from megatron_rl.config.schema import Config
from megatron_rl.config.schema.commands import RL_COMMANDS, SERVED_COMMANDS
from megatron_rl.data.trajectory import Prompt
from megatron_rl.errors import ConfigError, UserError
from megatron_rl.families.adapters import ADAPTER_FOLDER
from megatron_rl.run.checkpoint_folder import check_resume
from megatron_rl.system.files.atomic_files import is_locked, lock_file, remove_unfinished, write_atomic
from megatron_rl.system.files.probes import probe_folder
from megatron_rl.system.http.addresses import host_problem, listen_problem
from megatron_rl.system.http.url_files import named_urls

_LOCK = ".lock"
"""File that every run makes first, and that stays."""
_MAX_NAMED = 5
_RUN_FILES = (
    "metrics.jsonl", "timeline.json", "status.json", "report.html", "summary.json", "config.yaml", "mlflow_run.json",
    "samples", "tensorboard", "wandb", "wandb_run.json", "profile",
    "checkpoints", "policies", "policy", "first_prompts.json", "rolled_back_*",
)  # fmt: skip
"""Patterns of files that a run leaves; the MLflow store stays, because it may contain other runs."""
_FIRST_PROMPTS = "first_prompts.json"
_NUM_FIRST_PROMPTS = 16
_PROCESSES_PER_CORE, _FEW_PROCESSES = 8, 64
"""Limits of processes that compute, per core and on any machine: more only take memory from each other."""
_FILE_OUTPUTS = ("label-lines", "select-prompts")
"""Commands whose output path is a file; the outputs of the others are folders."""


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


def check_machine(config: Config, command: str, *, starts_ranks: bool = False, is_elsewhere: bool = False) -> None:
    """Raise ConfigError for a host that this machine cannot resolve or listen on, an invalid list of servers, and too many processes.

    ``starts_ranks``: the ranks and managed servers start here, on the CPU. ``is_elsewhere``: the run has other cores.
    """
    rollout = config.rollout
    too_many = [] if is_elsewhere else list(_process_problems(config, command, starts_ranks=starts_ranks))
    if too_many:
        raise ConfigError("\n".join(too_many))
    if command not in SERVED_COMMANDS:
        return
    urls = {"rollout.urls": rollout.urls, "eval.urls": config.eval.urls if command in RL_COMMANDS else []}
    if rollout.urls_file and "://" not in rollout.urls_file:
        try:
            urls["rollout.urls_file"] = named_urls(rollout.urls_file)
        except UserError as error:
            raise ConfigError(f"rollout.urls_file: {error}") from error
    hosts = {(key, urlsplit(url).hostname or "") for key, listed in urls.items() for url in listed}
    problems = [f"{key}: {problem}" for key, host in sorted(hosts) if (problem := host_problem(host))]
    if not uses_attached_servers(rollout) and (problem := listen_problem(rollout.host)):
        problems.append(f"rollout.host: {problem}")
    if problems:
        raise ConfigError("\n".join(problems))


def _process_problems(config: Config, command: str, *, starts_ranks: bool) -> Iterator[str]:
    cores, numbers = len(os.sched_getaffinity(0)), {}
    if command in SERVED_COMMANDS:
        numbers = {"reward.num_workers": config.reward.num_workers, "rollout.num_workers": config.rollout.num_workers or 0}
    if starts_ranks:
        manages_servers = command in RL_COMMANDS and not uses_attached_servers(config.rollout)
        numbers |= {"parallel.num_ranks": config.parallel.num_ranks, "rollout.num_servers": config.rollout.num_servers * manages_servers}
    for key, number in numbers.items():
        if number > (most := max(_FEW_PROCESSES, _PROCESSES_PER_CORE * cores)):
            yield (
                f"{key}: expected at most {most} processes, {_PROCESSES_PER_CORE} per core of this machine, got {number}; one per core "
                "is enough (a dry run for another machine: --gpus-per-node)"
            )


def check_outputs(config: Config, command: str) -> None:
    """Make and write every output folder of ``command``, and remove it again. Raises UserError, which names the key."""
    folder = Path(config.run.output_dir)
    writes_run = command in RL_COMMANDS or (command == "select-prompts" and not config.select_prompts.scores_path)
    outputs = {"run.output_dir": folder} if writes_run else {}
    if command in RL_COMMANDS and is_locked(folder / ".lock"):
        raise UserError(f"run.output_dir: another run is writing to {folder} right now; give another folder")
    if (output := output_of(config, command)) and output[1]:
        key, path = output[0], Path(output[1])
        outputs[key] = path.parent if command in _FILE_OUTPUTS else path
        if command not in _FILE_OUTPUTS:
            _check_replaced(key, path, folder)
        elif path.is_dir():
            raise UserError(f"{key}: {path} is a folder; give a file")
    for key, folder in outputs.items():
        probe_folder(key, folder)


def _check_replaced(key: str, folder: Path, run_folder: Path) -> None:
    """Raise UserError unless ``folder`` is new, empty or an exported model: the export replaces it with all that it contains."""
    here, run = Path.cwd(), run_folder.resolve()
    if folder.resolve() in (here, *here.parents, run, *run.parents):
        raise UserError(f"{key}: the export replaces {folder}, which contains the working folder or run.output_dir; give another folder")
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    folders = [one.name for one in found if one.is_dir()]
    is_model = any(one.suffix == ".safetensors" for one in found) and folders in ([], [ADAPTER_FOLDER])
    if found and not is_model:
        names = ", ".join(one.name for one in found[:_MAX_NAMED])
        raise UserError(f"{key}: the export replaces {folder}, which is no exported model and contains {names}; give another folder")


@contextmanager
def os_errors_with_keys(config: Config) -> Iterator[None]:
    """Turn an OSError of the block into a ConfigError that names the key whose path it concerns."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        place = str(error.filename or "")
        texts = [(key, str(text)) for key, value in flat_params(config).items() for text in (value if isinstance(value, list) else [value])]
        keys = {text: key for key, text in texts if text and place.startswith(text)}
        key = f"{keys[max(keys, key=len)]}: " if keys else ""
        raise ConfigError(f"{key}{f'{place}: ' if place else ''}{error.strerror or error}") from error
