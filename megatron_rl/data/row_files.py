"""Rows of data files: JSON lines (plain or gzipped), JSON arrays, Parquet and local Hugging Face datasets.

Invariants: rows come in the order of the files, and inside a folder in the order of its shards. Every row has a
source ("file:line", or "file:row n" counted from 1 if there are no lines) that is the same in every run. One batch
of rows is in memory at a time (a JSON array is read whole). Every text in a row can be written as UTF-8, no name
occurs twice in an object, and nesting is shallow enough for recursive code.

A dataset folder is a folder saved to disk by ``datasets`` (state.json next to Arrow files, several splits under
dataset_dict.json), or a folder of data files whose names or subfolders contain the split. The ``datasets`` library
is not needed.
"""

import codecs
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import DataError

Row = dict[str, Any]

ROWS_PER_BATCH = 1024
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".arrow")
"""Suffixes of data files in a folder. A file given by name with another suffix is read as JSON lines."""
_SPLIT_NAMES = ("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation")
"""Names of files or subfolders of a dataset folder that contain a split."""


_MAX_DEPTH = 64
"""Maximum nesting depth of lists and objects."""
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

OnBadRow = Callable[[str, str], None]
"""Callback with (source, problem)."""


def raise_data_error(place: str, problem: str) -> None:
    """Default handler of a bad row: raises DataError."""
    raise DataError(f"{place}: {problem}")


def read_rows(
    files: Sequence[str], *, split: str = "train", on_bad_row: OnBadRow = raise_data_error
) -> Iterator[tuple[Row, str]]:
    """(row, source) of every row of ``files``. Raises DataError for files that are missing or cannot be read.

    Args:
        files: Files and dataset folders.
        split: Split to read from dataset folders that have several.
        on_bad_row: Called with source and problem of a row that is not a JSON object; if it returns, reading continues.
            A file that is damaged as a whole is always an error.
    """
    for name in files:
        path = Path(name)
        if path.is_dir():
            number = 0
            for file in _dataset_files(path, split):
                for row, _ in _read_file(file, on_bad_row):
                    number += 1
                    yield row, f"{name}:row {number}"
        elif path.is_file():
            for row, place in _read_file(path, on_bad_row):
                yield row, f"{name}:{place}"
        elif path.exists():
            raise DataError(
                f"{name} is a pipe or device, not a file, and data is read several times; write it to a file first"
            )
        else:
            raise DataError(
                f"data file {name} does not exist; give the path of a JSONL or Parquet file, or of a dataset folder"
            )


def lookup(row: Mapping[str, Any], field: str) -> Any:
    """Value of ``field``: a column, or a path into nested ones (``reward_model.ground_truth``, ``turns.0.text``).

    Returns None if the value is missing, as for a null: Parquet and Arrow fill missing fields with nulls.
    """
    if field in row:
        return row[field]
    value: Any = row
    for part in field.split("."):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def is_missing(value: Any) -> bool:
    """True for None, and for NaN, which tables written by pandas contain instead."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def describe(value: Any) -> str:
    """Description of an unexpected value, for error messages."""
    if value is None:
        return "nothing (the field is missing or null)"
    return f"{type(value).__name__} {str(value)[:40]!r}"


def not_json(value: Any) -> str:
    """Reason why ``value`` cannot be written as JSON, or "". Checkpoints and reward workers store row fields as JSON."""
    if value is None or isinstance(value, (str, bool, int)):
        return ""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{value} is not a number in JSON"
    if isinstance(value, Mapping):
        wrong_keys = [key for key in value if not isinstance(key, str)]
        parts = [f"a key is {describe(wrong_keys[0])}"] if wrong_keys else [not_json(part) for part in value.values()]
    elif isinstance(value, (list, tuple)):
        parts = [not_json(part) for part in value]
    else:
        return f"{type(value).__name__} is not a JSON type"
    return next((part for part in parts if part), "")


def _dataset_files(folder: Path, split: str) -> list[Path]:
    """Data files of ``split``, in order. A folder without splits is read whole, regardless of ``split``."""
    if (folder / "dataset_dict.json").is_file():
        splits = _read_json(folder / "dataset_dict.json").get("splits", [])
        if not isinstance(splits, list) or not all(isinstance(name, str) for name in splits):
            raise DataError(f"{folder}/dataset_dict.json: splits: expected a list of names, got {describe(splits)}")
        if split not in splits:
            raise DataError(f"{folder}: no split {split!r}; its splits are {', '.join(splits)}: set data.split")
        return _dataset_files(folder / split, split)
    if (folder / "state.json").is_file():
        return _saved_files(folder)
    files = sorted(
        file for file in folder.rglob("*") if file.is_file() and _is_data(file) and not _is_hidden(file, folder)
    )
    if not files:
        raise DataError(
            f"{folder}: no data files; expected state.json and Arrow files, or files {', '.join(_SUFFIXES)}"
        )
    by_split = {file: _split_of(file, folder, split) for file in files}
    chosen = [file for file in files if by_split[file] == split]
    splits = sorted({name for name in by_split.values() if name})
    if not chosen and splits:
        raise DataError(f"{folder}: no split {split!r}; its splits are {', '.join(splits)}: set data.split")
    return chosen or files


def _saved_files(folder: Path) -> list[Path]:
    """Arrow files of one dataset written by save_to_disk."""
    state = _read_json(folder / "state.json")
    if state.get("_indices_data_files"):
        raise DataError(
            f"{folder}: the dataset is a selection over an indices file; save it again after dataset.flatten_indices()"
        )
    entries = state.get("_data_files", [])
    names = (
        [entry.get("filename") if isinstance(entry, dict) else None for entry in entries or ()]
        if isinstance(entries, list)
        else [None]
    )
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise DataError(f"{folder}/state.json: _data_files: expected objects with the filename of a file in the folder")
    files = [folder / str(name) for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise DataError(f"{folder}: state.json lists {missing[0]}, which is missing; copy the folder again")
    return files


def _is_data(file: Path) -> bool:
    return file.name.endswith(_SUFFIXES) and file.name not in ("state.json", "dataset_info.json", "dataset_infos.json")


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _split_of(file: Path, folder: Path, wanted: str) -> str:
    """Split named by a subfolder, or by the file name before a dot, dash or underscore; "" if there is none."""
    *folders, name = file.relative_to(folder).parts
    stem = name.split(".")[0].replace("-", "_").split("_")[0]
    return next((part for part in (*folders, stem) if part == wanted or part in _SPLIT_NAMES), "")


def _read_file(path: Path, on_bad_row: OnBadRow) -> Iterator[tuple[Row, str]]:
    """(row, source inside the file) of every row."""
    if path.suffix == ".parquet":
        return _read_batches(path, _parquet_batches)
    if path.suffix == ".arrow":
        return _read_batches(path, _arrow_batches)
    return _read_json_rows(path, on_bad_row)


def _read_json_rows(path: Path, on_bad_row: OnBadRow) -> Iterator[tuple[Row, str]]:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            if path.name.endswith((".json", ".json.gz")) and _starts_with_bracket(lines):
                yield from _read_array(path, lines.read(), on_bad_row)
                return
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                row, problem = parse_row(line, is_first=number == 1)
                if problem:
                    on_bad_row(f"{path}:{number}", problem)
                else:
                    yield row, str(number)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: incomplete gzip file: {error}; copy it again") from error


def _starts_with_bracket(lines: Any) -> bool:
    start = lines.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8).lstrip()
    while not start and (more := lines.read(1)):
        start = more.lstrip()
    lines.seek(0)
    return start.startswith(b"[")


def _read_array(path: Path, content: bytes, on_bad_row: OnBadRow) -> Iterator[tuple[Row, str]]:
    rows, problem = _parsed(content, is_first=True)
    if problem:
        raise DataError(f"{path}: {problem}; expected an array of objects, or one object per line")
    for number, row in enumerate(rows, start=1):
        problem = _problem(row)
        if problem:
            on_bad_row(f"{path}:row {number}", problem)
        else:
            yield row, f"row {number}"


def parse_row(line: bytes, *, is_first: bool) -> tuple[Row, str]:
    """(object on a line, its problem or ""). The first line may start with UTF-8's byte order mark."""
    row, problem = _parsed(line, is_first=is_first)
    problem = f"{problem}; expected one object per line" if problem else _problem(row)
    return ({}, problem) if problem else (row, "")


def _parsed(content: bytes, *, is_first: bool) -> tuple[Any, str]:
    try:
        text = (content.removeprefix(codecs.BOM_UTF8) if is_first else content).decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        where = f" in line {line}" if line > 1 else ""
        kind = "UTF-16; convert it with iconv -f UTF-16 -t UTF-8" if content.startswith(_UTF16) else str(error)
        return {}, f"not UTF-8 text{where}: {kind}"
    try:
        return json.loads(text, object_pairs_hook=_unique), ""
    except (ValueError, RecursionError) as error:
        return {}, f"not valid JSON: {error}"


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"field {next(name for name in names if names.count(name) > 1)!r} occurs twice in an object")
    return content


def _problem(row: Any) -> str:
    """Reason why a JSON value is not a row that can be traversed and written; "" if it is valid."""
    if not isinstance(row, dict):
        return f"expected a JSON object, got {type(row).__name__}"
    for name, value in row.items():
        problem = _unusable(value) or _unusable(name)
        if problem:
            return f"field {name!r}: {problem}"
    return ""


def _unusable(value: Any) -> str:
    # Walk level by level instead of recursing, because hostile nesting would exhaust the stack.
    level = [value]
    for _ in range(_MAX_DEPTH):
        texts = [part for part in level if isinstance(part, str)]
        if not all(map(_is_writable, texts)):
            return "a text contains half of a surrogate pair, which is not a character; clean the data"
        inside = [part for part in level if isinstance(part, dict | list)]
        if not inside:
            return ""
        level = [
            part for node in inside for part in (list(node) + list(node.values()) if isinstance(node, dict) else node)
        ]
    return f"nested deeper than {_MAX_DEPTH} levels"


def _is_writable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_json(path: Path) -> Row:
    row, problem = parse_row(path.read_bytes(), is_first=True)
    if problem:
        raise_data_error(str(path), problem)
    return row


def _read_batches(path: Path, batches: Any) -> Iterator[tuple[Row, str]]:
    import pyarrow

    number = 0
    try:
        for batch in batches(path):
            for row in batch.to_pylist():
                number += 1
                yield row, f"row {number}"
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        kind = path.suffix.lstrip(".").capitalize()
        raise DataError(
            f"{path}: incomplete or damaged {kind} file (after row {number}): {str(error).splitlines()[0]}; copy it again"
        ) from error


def _parquet_batches(path: Path) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=ROWS_PER_BATCH)


def _arrow_batches(path: Path) -> Iterator[Any]:
    """Record batches of an Arrow file. ``datasets`` writes the streaming format, other programs the format with a
    footer."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        is_file_format = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pyarrow.ipc.open_file(source) if is_file_format else pyarrow.ipc.open_stream(source)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file_format else reader
        for batch in batches:
            batch.validate(full=True)  # offsets come from the file, and damaged offsets would crash the process
            for start in range(0, batch.num_rows, ROWS_PER_BATCH):
                yield batch.slice(start, ROWS_PER_BATCH)
