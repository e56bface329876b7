"""The checks of ``megatron-rl doctor`` in order: this process, the ranks, trainer and servers."""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_rl.config.checks import check_config
from megatron_rl.config.checks.servers import Node, gpu_problems
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import Config
from megatron_rl.desk.doctor.machine_checks import FAIL, SKIPPED, WARN, CheckResult, environment_lines, show
from megatron_rl.desk.doctor.rank_checks import NO_ANSWER, TIMEOUT_S, rank_lines, run_ranks
from megatron_rl.errors import ConfigError, UserError
from megatron_rl.system.gpu.gpu_environment import count_gpus, set_gpu_defaults

_ENGINES = "trainer and servers"
_ENGINE_MARGIN_S = 900.0
"""Time for loading, publishing and sampling, in addition to the start of the servers."""


def print_lines(recipes: Sequence[str], model: str | None, overrides: Sequence[str]) -> int:
    """Print each check result as soon as it is known. Returns the exit status: 1 if a check fails.

    Under a launcher every rank calls this function, and rank 0 prints.
    """
    if model and recipes:
        raise UserError("doctor: --model replaces a recipe; give policy.path=FOLDER with --config")
    if overrides and not (recipes or model):
        raise UserError(f"doctor: {overrides[0]} overrides a recipe; give --config FILE or --model FOLDER")
    options = [*_of_model(model), *overrides]
    # Set them first, because libraries read these variables when they are loaded.
    _prepare_gpus()
    config = _checked(recipes, options) if recipes or model else None
    console = Console(quiet=os.environ.get("RANK", "0") != "0", highlight=False)
    counts = {WARN: 0, FAIL: 0}
    for line in _lines(config, recipes, options):
        show(line, console)
        if line.state in counts:
            counts[line.state] += 1
    console.print(f"{counts[FAIL]} failed, {counts[WARN]} to check")
    return 1 if counts[FAIL] else 0


def _of_model(model: str | None) -> list[str]:
    """Overrides with which the defaults become a recipe for the model folder; empty without one."""
    if not model:
        return []
    import torch

    num_gpus = torch.cuda.device_count()
    options = [f"policy.path={model}", f"policy.dtype={'bfloat16' if num_gpus else 'float32'}"]
    # NCCL allows one process per GPU: on a single GPU the servers must share the trainer's.
    return [*options, "rollout.placement=colocated"] if num_gpus == 1 else options


def _prepare_gpus() -> None:
    """Set the environment variables that a run sets."""
    import torch

    if torch.cuda.is_available():
        set_gpu_defaults()


def _checked(recipes: Sequence[str], options: Sequence[str]) -> Config:
    """Load the recipe. Raises ConfigError if `train` would refuse its models, servers or GPUs."""
    config = load_config(recipes, options)
    world_size = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None
    check_config(config, command="doctor", world_size=world_size)
    if os.environ.get("GROUP_RANK", "0") == "0":  # servers start on the driver's node
        num_ranks = world_size or config.parallel.num_ranks or 1
        node = Node(count_gpus(), int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)))
        problems = list(gpu_problems(config, node, num_ranks, "train"))
        if problems:
            raise ConfigError("\n".join(problems))
    return config


def _lines(config: Config | None, recipes: Sequence[str], options: Sequence[str]) -> Iterator[CheckResult]:
    if os.environ.get("RANK", "0") == "0":
        yield from environment_lines(config.run.output_dir if config else ".")
    with tempfile.TemporaryDirectory(prefix="megatron-rl-doctor-") as scratch:
        # Finish the rank checks first: after a failure the check of trainer and servers is skipped.
        ranks = list(_rank_lines(Path(scratch)))
        yield from ranks
        if config is None:
            yield CheckResult(_ENGINES, SKIPPED, "give --config RECIPE or --model FOLDER to compare trainer and servers")
        elif any(line.state == FAIL for line in ranks):
            yield CheckResult(_ENGINES, SKIPPED, "the ranks cannot communicate, so they cannot train")
        else:
            yield from _engine_lines(config, {"config": list(recipes), "overrides": list(options)}, Path(scratch))


def _rank_lines(scratch: Path) -> Iterator[CheckResult]:
    if "RANK" in os.environ:
        try:
            yield from rank_lines()
        except (RuntimeError, ValueError) as error:  # torch raises these in a rendezvous or a collective
            yield CheckResult("all-reduce of ranks", FAIL, str(error).splitlines()[0], NO_ANSWER)
        return
    num_ranks = _devices_here()
    module = "megatron_rl.desk.doctor.rank_checks"
    yield from _launched(
        module, {}, num_ranks, scratch, 2 * TIMEOUT_S, CheckResult("all-reduce of ranks", FAIL, "", NO_ANSWER)
    )


def _devices_here() -> int:
    import torch

    return torch.cuda.device_count() or 2


def _engine_lines(config: Config, job: dict[str, Any], scratch: Path) -> Iterator[CheckResult]:
    if "RANK" in os.environ:
        from megatron_rl.desk.doctor.engine_checks import engine_lines

        yield from engine_lines(config)
        return
    timeout_s = config.rollout.start_timeout_s + _ENGINE_MARGIN_S
    failed = CheckResult(_ENGINES, FAIL, "")
    yield from _launched(
        "megatron_rl.desk.doctor.engine_checks", job, max(1, config.parallel.num_ranks), scratch, timeout_s, failed
    )


def _launched(
    module: str, job: dict[str, Any], num_ranks: int, scratch: Path, timeout_s: float, failed: CheckResult
) -> Iterator[CheckResult]:
    """Check results of ``module`` on ranks of this node, or ``failed`` with the reason if the ranks write no result."""
    name = module.rpartition(".")[2]
    out, job_file = scratch / f"{name}.lines", scratch / f"{name}.json"
    job_file.write_text(json.dumps({**job, "out": str(out)}))
    reason = run_ranks(module, job_file, num_ranks, scratch / f"{name}.log", timeout_s)
    if out.exists():
        yield from (CheckResult(**line) for line in json.loads(out.read_text()))
    else:
        yield CheckResult(failed.name, FAIL, f"{num_ranks} ranks: {reason or 'they exited without a result'}", failed.remedy)
