"""Reads and writes ``checkpoints/`` of a run as files: list, validate, decide what to remove. No Megatron, no torch.

``step-N/`` has a folder per model, ``driver.json``, the arrays of its responses next to it (``driver.int32.npy``,
one file per dtype, see ``state_arrays.py``) and, written last, ``manifest.json`` with sizes and checksums of
the driver's files. Each model's folder has its own ``checksums.json``. ``latest.json`` names the newest
checkpoint. Without torch, a folder can be checked before anything starts.
"""

import hashlib
import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import UserError
from megatron_rl.run.state_arrays import unflatten_state
from megatron_rl.system.files.atomic_files import write_atomic
from megatron_rl.system.files.checksums import Checksums, checksums, damaged, parse_checksums

MODEL_CHECKSUMS = "checksums.json"
_LATEST, _MANIFEST, _DRIVER = "latest.json", "manifest.json", "driver.json"
_BUFFER_BYTES = 1 << 17
"""Write buffer per file: a few chunks of a response, small enough to stay in a core's cache."""
_NAME = re.compile(r"step-(0|[1-9][0-9]{0,11})")


class DamagedCheckpoint(UserError):
    """Raised for a damaged file; names the file and the damage."""


@dataclass(frozen=True)
class Manifest:
    """Metadata of a checkpoint."""

    healthy: bool
    """True if training showed no warning sign when the checkpoint was saved."""
    files: Mapping[str, tuple[int, str]]
    """Size and SHA-256 by file."""


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
    """Write the driver's state as ``json_with_arrays.flatten_state`` returns it. Raises OSError.

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


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest, or return an empty one for old checkpoints. Raises DamagedCheckpoint."""
    path = folder / _MANIFEST
    content = _json(path)
    try:
        files = parse_checksums(content.get("files"))
    except ValueError as error:
        raise DamagedCheckpoint(f"{path}: {error}") from error
    if not isinstance(content.get("healthy"), bool) or _DRIVER not in files:
        raise DamagedCheckpoint(f"{path} is not the manifest of a checkpoint")
    return Manifest(content["healthy"], files)


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
        arrays = {name: np.load(folder / Path(file).name, allow_pickle=False) for name, file in names.items()}
        whole: dict[str, Any] = unflatten_state(state, arrays)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"{path}: its arrays cannot be read: {error}") from error
    return whole


def check_folder(folder: Path, models: list[str]) -> None:
    """All but the contents of the models' files, which the ranks verify. Raises DamagedCheckpoint."""
    _raise_first(damaged(folder, read_manifest(folder).files))
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
    evaluated = [steps for steps in saved if math.isfinite(accuracies.get(steps, math.nan))]
    kept |= set(sorted(evaluated, key=lambda steps: -accuracies[steps])[: rules.keep_best])
    # Entries are ordered newest first.
    kept |= set([steps for steps, folder in saved.items() if is_healthy(folder)][:1])
    return [folder for folder in folders if folder not in [saved[steps] for steps in kept]]


def is_healthy(folder: Path) -> bool:
    """True if the manifest is readable and training showed no warning sign at the save."""
    try:
        return read_manifest(folder).healthy
    except DamagedCheckpoint:
        return False


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
