"""Tracking and profiling keys are checked before anything starts: packages, accounts, names."""

from dataclasses import replace

import pytest

from megatron_rl.config import checks
from megatron_rl.config.schema import Config, TrackingConfig, WandbMode


def problems(**tracking):
    return list(checks.tracking_problems(replace(Config(), tracking=TrackingConfig(**tracking))))


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """Names of the installed packages; tests add to the set."""
    installed = set()
    monkeypatch.setattr(checks, "find_spec", lambda name: object() if name in installed else None)
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return installed


def test_runs_without_tensorboard_and_wandb_need_no_package(packages):
    assert problems() == [] and problems(mlflow=False) == []


@pytest.mark.parametrize(("package", "tracking"), [("tensorboard", {"tensorboard": True}), ("wandb", {"wandb": WandbMode.offline})])
def test_missing_tracking_package_is_reported_with_its_remedy(packages, package, tracking):
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


def test_mlflow_names_are_rejected_without_mlflow(packages):
    assert len(problems(mlflow=False, mlflow_model="m", mlflow_parent="p")) == 2
    assert problems(mlflow_model="m", mlflow_parent="p") == []
