"""Finds models and data sets that were downloaded from the Hugging Face Hub, and uploads a model folder. Never downloads."""

import re
from pathlib import Path
from typing import Literal

from megatron_rl.errors import UserError

_NAME = re.compile(r"(?=.{3,200}$)([A-Za-z0-9][\w.-]*/[\w.-]*[A-Za-z0-9])(/[\w./-]+)?")
_DATA_FILE = re.compile(r"\.(jsonl?|parquet|arrow|gz|txt)$")
CARD = "README.md"


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


def pushed_files(folder: Path) -> list[Path]:
    """Files of ``folder`` that are uploaded: no hidden ones, no subfolders, and no card of another model.

    Raises UserError unless it is a Hugging Face model folder with weights.
    """
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise UserError(
            f"--push: expected a Hugging Face model folder, but {folder} lacks config.json or *.safetensors; convert it with --to hf"
        )
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name[0] != "." and path.name != CARD)


def push_folder(folder: Path, name: str, card: str, *, private: bool) -> str:
    """Upload ``folder`` as the model ``name`` (owner/name) and return the commit's address; creates the repository if necessary.

    The endpoint and the token are those of huggingface_hub (HF_ENDPOINT, HF_TOKEN, ``hf auth login``). Raises UserError.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    files: list[tuple[str, str | bytes]] = [(path.name, str(path)) for path in pushed_files(folder)]
    operations = [CommitOperationAdd(path, content) for path, content in [*files, (CARD, card.encode())]]
    api = HfApi(library_name="megatron_rl")
    try:
        api.create_repo(name, private=private or None, exist_ok=True)
        commit = api.create_commit(name, operations, commit_message="Upload with megatron_rl")
    except HfHubHTTPError as error:
        status = error.response.status_code
        remedy = "; log in with `hf auth login`, or set HF_TOKEN to a token that may write there" if status in (401, 403) else ""
        raise UserError(f"--push {name}: the Hub at {api.endpoint} refused it ({str(error).splitlines()[0]}){remedy}") from error
    except (OSError, ValueError, RuntimeError) as error:  # no network, HF_HUB_OFFLINE, a name that the Hub does not allow
        raise UserError(f"--push {name}: {str(error).splitlines()[0]}; nothing was committed") from error
    return str(commit.commit_url)
