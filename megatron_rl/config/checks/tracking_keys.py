"""Checks of tracking and profiling: optional packages, the account of a tracker, profiled steps and ranks."""

import netrc
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from megatron_rl.config.schema import Config, WandbMode
from megatron_rl.system.http.addresses import address_problem

_WANDB_SERVER = "https://api.wandb.ai"


def problems(config: Config) -> Iterator[str]:
    tracking = config.tracking
    wanted = {"tensorboard": tracking.tensorboard, "wandb": tracking.wandb is not None}
    for package, is_wanted in wanted.items():
        if is_wanted and find_spec(package) is None:
            off = "false" if package == "tensorboard" else "null"
            yield (
                f"tracking.{package}: the package {package} is not installed; install it (pip install -e '.[{package}]'), or set "
                f"tracking.{package}={off}"
            )
    if tracking.wandb is WandbMode.online and find_spec("wandb") and not _has_wandb_account():
        yield (
            "tracking.wandb: online needs an account, and neither WANDB_API_KEY is set nor has `wandb login` stored a key on this "
            "machine; log in, or set tracking.wandb=offline and upload the run with `wandb sync` afterwards"
        )
    address = re.sub("//[^/@]*@", "//", tracking.mlflow_uri)  # MLflow accepts a user and a password
    if address.startswith(("http://", "https://")) and (problem := address_problem(address)):
        yield f"tracking.mlflow_uri: {problem}"
    if tracking.mlflow_model and not tracking.mlflow:
        yield "tracking.mlflow_model: a model is registered in MLflow, and tracking.mlflow=false; set it to true, or the name to ''"
    if tracking.mlflow_parent and not tracking.mlflow:
        yield "tracking.mlflow_parent: runs are nested in MLflow, and tracking.mlflow=false; set it to true, or the name to ''"


def profile_problems(config: Config, num_ranks: int) -> Iterator[str]:
    """Check profiled steps and ranks; ``num_ranks`` 0: not known yet."""
    profile = config.profile
    late = [step for step in profile.steps if step > config.run.num_steps]
    if late:
        yield f"profile.steps: the run has run.num_steps={config.run.num_steps} steps and does not reach {late}; give earlier steps"
    missing = [rank for rank in profile.ranks if rank >= num_ranks > 0] if profile.steps else []
    if missing:
        yield f"profile.ranks: there are {num_ranks} trainer ranks, counted from 0, so {missing} do not exist"
    if profile.memory and not profile.steps:
        yield "profile.memory: snapshots are taken in the steps of profile.steps, which is empty; give some, or set profile.memory=false"


def _has_wandb_account() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    if (Path.home() / ".config" / "wandb" / "settings").is_file():  # may contain the address of a private server
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or _WANDB_SERVER).hostname or ""
    try:
        file = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return host in file.hosts
