"""``checkpoints/`` of a run as files: which are there, what they say of themselves, which are whole as far as sizes tell.

``step-N/`` holds a folder per model, ``driver.json`` with the arrays of its responses beside it (``driver.int32.npy``, one
file per dtype, see ``state_arrays.py``) and, written last, ``manifest.json`` with sizes and checksums of the files that are
the driver's; each model's folder has ``checksums.json`` of its own. ``latest.json`` names the newest one. No Megatron, no
torch: a folder can be looked at before anything starts.
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
"""Of a file that is written: some parts of a response, so few that they stay in a core's cache."""
_NAME = re.compile(r"step-(0|[1-9][0-9]{0,11})")


class DamagedCheckpoint(UserError):
    """Says which file, and what is wrong with it."""


@dataclass(frozen=True)
class Manifest:
    """What is known of a checkpoint without its contents."""

    healthy: bool
    """Training showed no sign of having died when it was saved."""
    files: Mapping[str, tuple[int, str]]


def folder_name(num_steps: int) -> str:
    return f"step-{num_steps}"


def num_steps_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def saved_folders(checkpoints: Path) -> list[Path]:
    """``step-N`` folders, newest first, whole or not."""
    try:
        found = [path for path in checkpoints.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except OSError:
        return []
    return sorted(found, key=num_steps_of, reverse=True)


def write_driver_state(folder: Path, state: Mapping[str, Any], arrays: Mapping[str, Sequence[np.ndarray]]) -> Checksums:
    """The driver's part as ``flat_arrays.flatten_state`` gives it; returns what ``write_manifest`` says of its files.

    Raises OSError.
    """
    names = {name: f"driver.{name}.npy" for name in arrays}
    folder.mkdir(parents=True, exist_ok=True)
    of_arrays = {names[name]: _write_array(folder / names[name], parts) for name, parts in arrays.items()}
    write_atomic(folder / _DRIVER, json.dumps({**state, "arrays": names}))
    return checksums(folder, [_DRIVER]) | of_arrays


def _write_array(path: Path, parts: Sequence[np.ndarray]) -> tuple[int, str]:
    """``parts`` back to back as one .npy file, from where they lie; its bytes and SHA-256, without reading it again."""
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
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()


def write_manifest(folder: Path, models: list[str], driver: Checksums, *, healthy: bool) -> None:
    """The last file of a checkpoint. Raises OSError."""
    files = driver | checksums(folder, [f"{model}/{MODEL_CHECKSUMS}" for model in models])
    write_atomic(folder / _MANIFEST, json.dumps({"healthy": healthy, "files": files}))


def begin(folder: Path) -> None:
    """An earlier checkpoint of this name counts no more."""
    for name in (_MANIFEST, _DRIVER):
        (folder / name).unlink(missing_ok=True)


def write_latest(folder: Path) -> None:
    write_atomic(folder.parent / _LATEST, json.dumps({"folder": folder.name}))


def latest_folder(checkpoints: Path) -> Path | None:
    """The one that ``latest.json`` names; None where there is no such file. Raises DamagedCheckpoint."""
    path = checkpoints / _LATEST
    if not path.exists():
        return None
    content = _json(path)
    name = content.get("folder")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise DamagedCheckpoint(f"{path} names {name!r}; expected step-N, a folder next to it")
    if not (checkpoints / name).is_dir():
        raise DamagedCheckpoint(f"{path} names {name}, which is not there")
    return checkpoints / name


def read_manifest(folder: Path) -> Manifest:
    """Raises DamagedCheckpoint."""
    path = folder / _MANIFEST
    content = _json(path)
    try:
        files = parse_checksums(content.get("files"))
    except ValueError as error:
        raise DamagedCheckpoint(f"{path}: {error}") from error
    if not isinstance(content.get("healthy"), bool) or _DRIVER not in files:
        raise DamagedCheckpoint(f"{path} is no manifest of a checkpoint")
    return Manifest(content["healthy"], files)


def read_driver(folder: Path) -> dict[str, Any]:
    """The driver's part. Raises DamagedCheckpoint."""
    path = folder / _DRIVER
    state = _json(path)
    steps, version = state.get("num_steps_done"), state.get("weight_version")
    if type(steps) is not int or type(version) is not int or not isinstance(state.get("pool"), dict):
        raise DamagedCheckpoint(f"{path} does not hold the state of a run")
    if steps != num_steps_of(folder):
        raise DamagedCheckpoint(f"{path} is of {steps} steps, its folder of {num_steps_of(folder)}")
    try:
        names = dict(state.pop("arrays"))
        arrays = {name: np.load(folder / Path(file).name, allow_pickle=False) for name, file in names.items()}
        whole: dict[str, Any] = unflatten_state(state, arrays)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"{path}: its arrays cannot be read: {error}") from error
    return whole


def check_folder(folder: Path, models: list[str]) -> None:
    """All but the contents of the models' files, which their ranks compare. Raises DamagedCheckpoint."""
    _raise_first(damaged(folder, read_manifest(folder).files))
    for model in models:
        _raise_first(_wrong_sizes(folder / model))
    if not (folder / _DRIVER).is_file():
        raise DamagedCheckpoint(f"{folder / _DRIVER} is missing")


def removable(checkpoints: Path, newest: int, rules: RunConfig, accuracies: Mapping[int, float]) -> list[Path]:
    """What no rule keeps: neither the newest ones nor those of every k-th step, of the best evaluations, of healthy training.

    ``newest``: steps done at the newest one; what is there of later steps is of a future that the run has left.
    ``accuracies``: of the evaluations, by steps done.
    """
    everything = saved_folders(checkpoints)
    saved = {num_steps_of(f): f for f in everything if num_steps_of(f) <= newest and (f / _DRIVER).is_file()}
    kept = set(list(saved)[: rules.keep_last])
    if rules.keep_every_steps:
        kept |= {steps for steps in saved if steps % rules.keep_every_steps == 0}
    evaluated = [steps for steps in saved if math.isfinite(accuracies.get(steps, math.nan))]
    kept |= set(sorted(evaluated, key=lambda steps: -accuracies[steps])[: rules.keep_best])
    kept |= set([steps for steps, folder in saved.items() if is_healthy(folder)][:1])
    return [folder for folder in everything if folder not in [saved[steps] for steps in kept]]


def is_healthy(folder: Path) -> bool:
    """Whole as far as its manifest tells, and saved while training showed no sign of having died."""
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
        raise DamagedCheckpoint(f"{path} is not whole JSON: {error}") from error
    if not isinstance(content, dict):
        raise DamagedCheckpoint(f"{path}: expected an object of JSON, got a {type(content).__name__}")
    return content
