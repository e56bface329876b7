"""Uploads a model folder to the Hugging Face Hub in one commit, with a given model card."""

from pathlib import Path

from megatron_rl.errors import UserError

CARD = "README.md"


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
