"""The folder that an example's make_task.py writes: prompts in JSONL files and an untrained model, whole or not at all."""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path


def write_task_folder(
    output: Path,
    files: Mapping[str, Iterable[dict[str, str]]],
    write_model_folder: Callable[[Path], None],
    *,
    overwrite: bool,
) -> None:
    """Write ``<name>.jsonl`` of each name's rows, and model/, into a folder next to ``output`` and rename it at the end.

    Raises FileExistsError if ``output`` is there and ``overwrite`` is off.
    """
    if output.exists() and not overwrite:
        raise FileExistsError(f"{output} is there already; give another --output, or --overwrite to replace it")
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        os.chmod(draft, 0o755)
        for name, rows in files.items():
            with open(draft / f"{name}.jsonl", "w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        write_model_folder(draft / "model")
        if output.exists():
            shutil.rmtree(output)
        os.rename(draft, output)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def at_least_one(text: str) -> int:
    """An argument of the command line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value
