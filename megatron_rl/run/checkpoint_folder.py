"""Reads and writes ``checkpoints/`` of a run as files: lists and checks them, finds the one to resume from, and decides
which to remove. Without torch, so that a folder can be checked before anything starts.

``step-N/`` has a folder per model, ``driver.json``, the arrays of its responses next to it (``driver.int32.npy``,
one file per dtype, see ``flatten_state``) and, written last, ``manifest.json`` with sizes and checksums of
the driver's files. Each model's folder has its own ``checksums.json``. ``latest.json`` names the newest
checkpoint.
"""

import hashlib
import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.schema import Config, RunConfig
from megatron_rl.errors import UserError
from megatron_rl.system.files.atomic_files import Checksums, checksums, damaged, parse_checksums, write_atomic

MODEL_CHECKSUMS = "checksums.json"
_LATEST, _MANIFEST, _DRIVER = "latest.json", "manifest.json", "driver.json"
_BUFFER_BYTES = 1 << 17
"""Write buffer per file: a few chunks of a response, small enough to stay in a core's cache."""
_NAME = re.compile(r"step-(0|[1-9][0-9]{0,11})")


class DamagedCheckpoint(UserError):
    """Raised for a damaged file; names the file and the damage."""


def folder_name(num_steps: int) -> str:
    return f"step-{num_steps}"


def num_steps_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def saved_folders(checkpoints: Path) -> list[Path]:
    """All ``step-N`` folders, newest first, complete or not."""
    try:
        found = [path for path in checkpoints.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except OSError:
        return []
    return sorted(found, key=num_steps_of, reverse=True)


def write_driver_state(folder: Path, state: Mapping[str, Any], arrays: Mapping[str, Sequence[np.ndarray]]) -> Checksums:
    """Write the driver's state as ``flatten_state`` returns it. Raises OSError.

    Returns the checksums of its files for ``write_manifest``.
    """
    names = {name: f"driver.{name}.npy" for name in arrays}
    folder.mkdir(parents=True, exist_ok=True)
    of_arrays = {names[name]: _write_array(folder / names[name], parts) for name, parts in arrays.items()}
    write_atomic(folder / _DRIVER, json.dumps({**state, "arrays": names}))
    return checksums(folder, [_DRIVER]) | of_arrays


def _write_array(path: Path, parts: Sequence[np.ndarray]) -> tuple[int, str]:
    """Write ``parts``, concatenated without a copy, as one .npy file. Returns its size and SHA-256 without rereading it."""
    header = io.BytesIO()
    form = np.lib.format.header_data_from_array_1_0(parts[0]) | {"shape": (sum(map(len, parts)),)}
    np.lib.format.write_array_header_1_0(header, form)
    digest = hashlib.sha256(header.getvalue())
    with open(path, "wb", buffering=_BUFFER_BYTES) as file:
        file.write(header.getvalue())
        for part in map(np.ascontiguousarray, parts):
            digest.update(part.data)
            file.write(part.data)
        file.flush()
        # The manifest vouches for this file, so its data must reach the disk first.
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()


def write_manifest(folder: Path, models: list[str], driver: Checksums, *, healthy: bool) -> None:
    """Write the last file of a checkpoint, which makes it count. Raises OSError."""
    files = driver | checksums(folder, [f"{model}/{MODEL_CHECKSUMS}" for model in models])
    write_atomic(folder / _MANIFEST, json.dumps({"healthy": healthy, "files": files}))


def begin(folder: Path) -> None:
    """Invalidate an earlier checkpoint in ``folder`` before it is overwritten."""
    for name in (_MANIFEST, _DRIVER):
        (folder / name).unlink(missing_ok=True)


def write_latest(folder: Path) -> None:
    write_atomic(folder.parent / _LATEST, json.dumps({"folder": folder.name}))


def latest_folder(checkpoints: Path) -> Path | None:
    """The folder that ``latest.json`` names, or None without that file. Raises DamagedCheckpoint."""
    path = checkpoints / _LATEST
    if not path.exists():
        return None
    content = _json(path)
    name = content.get("folder")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise DamagedCheckpoint(f"{path} names {name!r}; expected step-N, a folder next to it")
    if not (checkpoints / name).is_dir():
        raise DamagedCheckpoint(f"{path} names {name}, which does not exist")
    return checkpoints / name


def read_manifest(folder: Path) -> tuple[bool, Checksums]:
    """Return from the manifest whether the checkpoint is healthy, and size and SHA-256 by file. Raises DamagedCheckpoint."""
    path = folder / _MANIFEST
    content = _json(path)
    try:
        files = parse_checksums(content.get("files"))
    except ValueError as error:
        raise DamagedCheckpoint(f"{path}: {error}") from error
    if not isinstance(content.get("healthy"), bool) or _DRIVER not in files:
        raise DamagedCheckpoint(f"{path} is not the manifest of a checkpoint")
    return content["healthy"], files


def read_driver(folder: Path) -> dict[str, Any]:
    """Read the driver's state, arrays included. Raises DamagedCheckpoint."""
    path = folder / _DRIVER
    state = _json(path)
    steps, version = state.get("num_steps_done"), state.get("weight_version")
    if type(steps) is not int or type(version) is not int or not isinstance(state.get("pool"), dict):
        raise DamagedCheckpoint(f"{path} does not contain the state of a run")
    if steps != num_steps_of(folder):
        raise DamagedCheckpoint(f"{path} is from step {steps}, its folder from step {num_steps_of(folder)}")
    try:
        names = dict(state.pop("arrays"))
        # Only the file's name counts, so that a damaged entry cannot point outside the folder.
        arrays = {name: np.load(folder / Path(file).name, allow_pickle=False) for name, file in names.items()}
        whole: dict[str, Any] = unflatten_state(state, arrays)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"{path}: its arrays cannot be read: {error}") from error
    return whole


def check_folder(folder: Path, models: list[str]) -> None:
    """Raise DamagedCheckpoint if a file of a checkpoint is missing or damaged.

    Of the models' files only the sizes are checked; the ranks verify their contents when they load them.
    """
    _, files = read_manifest(folder)
    _raise_first(damaged(folder, files))
    for model in models:
        _raise_first(_wrong_sizes(folder / model))
    if not (folder / _DRIVER).is_file():
        raise DamagedCheckpoint(f"{folder / _DRIVER} is missing")


def removable(checkpoints: Path, newest: int, rules: RunConfig, accuracies: Mapping[int, float]) -> list[Path]:
    """Checkpoints that no keep rule covers: newest N, every k-th step, best evaluations, newest healthy one.

    ``newest``: steps done at the newest checkpoint; folders of later steps belong to an abandoned future and are
    removable. ``accuracies``: accuracy of each evaluation, keyed by steps done.
    """
    folders = saved_folders(checkpoints)
    saved = {num_steps_of(f): f for f in folders if num_steps_of(f) <= newest and (f / _DRIVER).is_file()}
    kept = set(list(saved)[: rules.keep_last])
    if rules.keep_every_steps:
        kept |= {steps for steps in saved if steps % rules.keep_every_steps == 0}
    # An evaluation without a single score has nan.
    evaluated = [steps for steps in saved if math.isfinite(accuracies.get(steps, math.nan))]
    kept |= set(sorted(evaluated, key=lambda steps: -accuracies[steps])[: rules.keep_best])
    # Entries are ordered newest first.
    kept |= set([steps for steps, folder in saved.items() if is_healthy(folder)][:1])
    return [folder for folder in folders if folder not in [saved[steps] for steps in kept]]


def is_healthy(folder: Path) -> bool:
    """True if the manifest is readable and training showed no warning sign at the save."""
    try:
        healthy, _ = read_manifest(folder)
    except DamagedCheckpoint:
        return False
    return healthy


def _wrong_sizes(model: Path) -> Iterator[str]:
    if not (model / "metadata.json").is_file():
        yield f"{model / 'metadata.json'} is missing"
        return
    try:
        expected = parse_checksums(_json(model / MODEL_CHECKSUMS))
    except ValueError as error:
        yield f"{model / MODEL_CHECKSUMS}: {error}"
        return
    for name, (size, _) in expected.items():
        path = model / name
        if not path.is_file():
            yield f"{path} is missing"
        elif path.stat().st_size != size:
            yield f"{path} has {path.stat().st_size} bytes instead of {size}"


def _raise_first(problems: Iterator[str]) -> None:
    for problem in problems:
        raise DamagedCheckpoint(problem)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is not complete JSON: {error}") from error
    if not isinstance(content, dict):
        raise DamagedCheckpoint(f"{path}: expected a JSON object, got a {type(content).__name__}")
    return content


def candidates(checkpoints: Path) -> list[Path]:
    """Checkpoints that a run may resume from, newest first: the folder in latest.json, and folders with a manifest.

    All other folders are incomplete.
    """
    try:
        # A damaged latest.json must not hide the complete checkpoints next to it.
        latest = latest_folder(checkpoints)
    except DamagedCheckpoint:
        latest = None
    return [f for f in saved_folders(checkpoints) if f == latest or (f / "manifest.json").exists()]


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
    latest_folder(checkpoints)
    models = [path.name for path in saved[0].iterdir() if path.is_dir()]
    try:
        check_folder(saved[0], models)
        read_driver(saved[0])
    except DamagedCheckpoint as error:
        raise UserError(f"{error}\n{resume_hint(checkpoints, saved[0], models)}") from error


def resume_hint(checkpoints: Path, refused: Path, models: Sequence[str]) -> str:
    """Hint for the error about ``refused``: an older checkpoint to resume from, or how to start over."""
    for folder in candidates(checkpoints):
        if num_steps_of(folder) < num_steps_of(refused):
            try:
                check_folder(folder, list(models))
            except DamagedCheckpoint:
                continue
            return f"{folder.name} is complete: run.resume=auto resumes from it"
    return "no older checkpoint is left; run.overwrite=true starts over (deletes what is there)"


_MARK = "__array__"
_NESTS = (dict, list, tuple, np.ndarray)


def flatten_state(nest: Any) -> tuple[Any, dict[str, list[np.ndarray]]]:
    """Returns (JSON-ready copy, arrays by dtype name). The arrays of a dtype, concatenated, are its flat array. Arrays are not copied."""
    parts: dict[str, list[np.ndarray]] = {}
    sizes: dict[str, int] = {}

    def plain(value: Any) -> Any:
        if not isinstance(value, _NESTS):
            return value  # the most frequent case
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if not isinstance(value, np.ndarray):
            return [plain(inner) for inner in value]
        name = _name(value.dtype)
        start = sizes.get(name, 0)
        parts.setdefault(name, []).append(value)
        sizes[name] = start + len(value)
        return {_MARK: [name, start, len(value)]}

    return plain(nest), parts


def unflatten_state(nest: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Inverse of ``flatten_state``, with lists instead of tuples. Raises ValueError for a span outside the flat arrays."""
    if isinstance(nest, list):
        return [unflatten_state(inner, arrays) for inner in nest]
    if not isinstance(nest, dict):
        return nest
    match nest.get(_MARK):
        case [str(name), int(start), int(length)] if len(nest) == 1:
            if name not in arrays or not 0 <= start <= start + length <= len(arrays[name]):
                raise ValueError(f"{length} entries from {start} on are outside the {name} arrays that were saved")
            # Copy, because a view would keep the whole flat array in memory.
            return arrays[name][start : start + length].copy()
    return {key: unflatten_state(inner, arrays) for key, inner in nest.items()}


@cache
def _name(dtype: np.dtype) -> str:
    """The dtype's name; cached, because numpy builds the string on every access."""
    return dtype.name
