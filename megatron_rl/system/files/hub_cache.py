"""Finds models and data sets that were downloaded from the Hugging Face Hub, by their names. Never downloads."""

import re
from pathlib import Path
from typing import Literal

_NAME = re.compile(r"(?=.{3,200}$)([A-Za-z0-9][\w.-]*/[\w.-]*[A-Za-z0-9])(/[\w./-]+)?")
_DATA_FILE = re.compile(r"\.(jsonl?|parquet|arrow|gz|txt)$")


def find_download(name: str, kind: Literal["model", "dataset"]) -> str:
    """Return the folder of the downloaded ``name`` (``owner/name``, or a subfolder of that), as huggingface_hub finds it in its cache.

    Returns ``name`` unchanged if a file or folder has that name, or if nothing complete is in the cache.
    """
    parts = _NAME.fullmatch(name)
    if parts is None or Path(name).exists():
        return name
    try:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(parts[1], repo_type=kind, local_files_only=True), (parts[2] or "").strip("/"))
    except (ImportError, OSError, ValueError):  # not in the cache, or a name that the Hub does not allow
        return name
    return str(folder) if folder.exists() else name


def download_hint(name: str, kind: Literal["model", "dataset"]) -> str:
    """End of an error about a missing ``name``: the command that downloads it, if it may be a name on the Hub; else ""."""
    parts = _NAME.fullmatch(name)
    if parts is None or _DATA_FILE.search(name):
        return ""
    option = "--repo-type dataset " if kind == "dataset" else ""
    return f" (if it is a {kind} on the Hugging Face Hub, download it first: hf download {option}{parts[1]})"
