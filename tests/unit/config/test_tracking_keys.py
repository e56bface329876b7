"""What a store lacks is told before anything starts."""

from dataclasses import replace

import pytest

from megatron_rl.config.checks import tracking_keys
from megatron_rl.config.schema import Config, TrackingConfig, WandbMode


def problems(**tracking):
    return list(tracking_keys.problems(replace(Config(), tracking=TrackingConfig(**tracking))))


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """What is installed: tests add to it."""
    installed = set()
    monkeypatch.setattr(tracking_keys, "find_spec", lambda name: object() if name in installed else None)
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return installed


def test_nothing_is_asked_of_those_who_use_neither(packages):
    assert problems() == [] and problems(mlflow=False) == []


@pytest.mark.parametrize(("package", "tracking"), [("tensorboard", {"tensorboard": True}), ("wandb", {"wandb": WandbMode.offline})])
def test_a_missing_library_is_named_with_its_remedy(packages, package, tracking):
    (problem,) = problems(**tracking)
    assert f"tracking.{package}" in problem and f"pip install -e '.[{package}]'" in problem
    packages.add(package)
    assert problems(**tracking) == []


def test_wandb_online_needs_an_account(packages, monkeypatch, tmp_path):
    packages.add("wandb")
    (problem,) = problems(wandb=WandbMode.online)
    assert "wandb login" in problem and "tracking.wandb=offline" in problem
    (tmp_path / "netrc").write_text("machine example.org login user password secret\n")
    assert len(problems(wandb=WandbMode.online)) == 1
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert problems(wandb=WandbMode.online) == []
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert len(problems(wandb=WandbMode.online)) == 1
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert problems(wandb=WandbMode.online) == []


def test_names_in_mlflow_need_mlflow(packages):
    assert len(problems(mlflow=False, mlflow_model="m", mlflow_parent="p")) == 2
    assert problems(mlflow_model="m", mlflow_parent="p") == []
