"""Names of the Hub lead to the snapshots in its cache, without a network."""

from pathlib import Path

import huggingface_hub.constants
import pytest

from megatron_rl.config.load import load_config
from megatron_rl.system.files.hub_cache import download_hint, find_download

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache in the Hub's layout with a model and a data set of two folders; the working folder is empty."""
    for repository, files in {
        "models--some--model": ["config.json"],
        "datasets--some--set": ["main/train.jsonl", "other/train.jsonl"],
    }.items():
        (tmp_path / repository / "refs").mkdir(parents=True)
        (tmp_path / repository / "refs" / "main").write_text(COMMIT)
        for name in files:
            path = tmp_path / repository / "snapshots" / COMMIT / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", None)  # nothing may ask the network
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def test_a_downloaded_name_is_the_folder_of_its_commit(cache: Path) -> None:
    model = f"{cache}/models--some--model/snapshots/{COMMIT}"
    data = f"{cache}/datasets--some--set/snapshots/{COMMIT}"
    assert find_download("some/model", "model") == model
    assert find_download("some/set/main", "dataset") == f"{data}/main"
    config = load_config(None, ["policy.path=some/model", "data.train_files=[some/set,mine.jsonl]"])
    assert config.policy.path == model and config.data.train_files == [data, "mine.jsonl"]


@pytest.mark.parametrize("name", ["", "model", "some/other", "some/set/nowhere", "../model", "a--b/c", "/some/model", "some/model/"])
def test_other_names_stay_as_they_are(cache: Path, name: str) -> None:
    assert find_download(name, "dataset") == name


def test_a_folder_is_preferred_to_a_download_of_its_name(cache: Path) -> None:
    Path("some/model").mkdir(parents=True)
    assert find_download("some/model", "model") == "some/model"


def test_a_missing_name_is_answered_with_the_command_that_downloads_it() -> None:
    assert download_hint("some/model", "model").endswith("hf download some/model)")
    assert download_hint("some/set/main", "dataset").endswith("hf download --repo-type dataset some/set)")
    assert download_hint("data/train.jsonl", "dataset") == download_hint("/models/mine", "model") == ""
