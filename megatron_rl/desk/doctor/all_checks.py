"""The lines of ``megatron-rl doctor``, in their order: this process, the ranks, the engines."""

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
from megatron_rl.desk.doctor.rank_launcher import run_ranks
from megatron_rl.errors import ConfigError, UserError
from megatron_rl.system.gpu.gpu_environment import count_gpus, set_gpu_defaults

_ENGINES = "both engines"
_ENGINE_MARGIN_S = 900.0
"""For loading, publishing and sampling, beyond the start of the servers."""


def print_lines(recipes: Sequence[str], model: str | None, overrides: Sequence[str]) -> int:
    """Each line as it is known; the exit status: 1 where one fails.

    Under a launcher every rank calls it, and rank 0 prints.
    """
    if model and recipes:
        raise UserError("doctor: --model is in the place of a recipe; give policy.path=FOLDER with --config")
    if overrides and not (recipes or model):
        raise UserError(f"doctor: {overrides[0]} belongs to a recipe; give --config FILE or --model FOLDER")
    words = [*_of_model(model), *overrides]
    _prepare_gpus()
    config = _checked(recipes, words) if recipes or model else None
    console = Console(quiet=os.environ.get("RANK", "0") != "0", highlight=False)
    counts = {WARN: 0, FAIL: 0}
    for line in _lines(config, recipes, words):
        show(line, console)
        if line.state in counts:
            counts[line.state] += 1
    console.print(f"{counts[FAIL]} failed, {counts[WARN]} to look at")
    return 1 if counts[FAIL] else 0


def _of_model(model: str | None) -> list[str]:
    """The recipe of a model folder alone."""
    if not model:
        return []
    import torch

    num_gpus = torch.cuda.device_count()
    words = [f"policy.path={model}", f"policy.dtype={'bfloat16' if num_gpus else 'float32'}"]
    # NCCL takes one process per GPU: on the only one the server shares the trainer's.
    return [*words, "rollout.placement=colocated"] if num_gpus == 1 else words


def _prepare_gpus() -> None:
    """The variables that a run sets."""
    import torch

    if torch.cuda.is_available():
        set_gpu_defaults()


def _checked(recipes: Sequence[str], words: Sequence[str]) -> Config:
    """Raises ConfigError for a recipe that `train` would not take, as far as it is about models, servers and GPUs."""
    config = load_config(recipes, words)
    world_size = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None
    check_config(config, command="doctor", world_size=world_size)
    if os.environ.get("GROUP_RANK", "0") == "0":  # servers start on the driver's node
        num_ranks = world_size or config.parallel.num_ranks or 1
        node = Node(count_gpus(), int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)))
        problems = list(gpu_problems(config, node, num_ranks, "train"))
        if problems:
            raise ConfigError("\n".join(problems))
    return config


def _lines(config: Config | None, recipes: Sequence[str], words: Sequence[str]) -> Iterator[CheckResult]:
    if os.environ.get("RANK", "0") == "0":
        yield from environment_lines(config.run.output_dir if config else ".")
    with tempfile.TemporaryDirectory(prefix="megatron-rl-doctor-") as scratch:
        ranks = list(_rank_lines(Path(scratch)))
        yield from ranks
        if config is None:
            yield CheckResult(_ENGINES, SKIPPED, "give --config RECIPE or --model FOLDER to compare them")
        elif any(line.state == FAIL for line in ranks):
            yield CheckResult(_ENGINES, SKIPPED, "ranks that do not reach one another cannot train")
        else:
            yield from _engine_lines(config, {"config": list(recipes), "overrides": list(words)}, Path(scratch))


def _rank_lines(scratch: Path) -> Iterator[CheckResult]:
    from megatron_rl.desk.doctor import rank_checks

    if "RANK" in os.environ:
        try:
            yield from rank_checks.rank_lines()
        except (RuntimeError, ValueError) as error:  # torch's own, of a rendezvous or a collective
            yield CheckResult("all-reduce of ranks", FAIL, str(error).splitlines()[0], rank_checks.NO_ANSWER)
        return
    num_ranks = _devices_here()
    module = "megatron_rl.desk.doctor.rank_checks"
    yield from _launched(
        module, {}, num_ranks, scratch, 2 * rank_checks.TIMEOUT_S, CheckResult("all-reduce of ranks", FAIL, "", rank_checks.NO_ANSWER)
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
    """What ``module`` found on ranks of this machine; ``failed`` with the reason where the ranks end without a word."""
    name = module.rpartition(".")[2]
    out, job_file = scratch / f"{name}.lines", scratch / f"{name}.json"
    job_file.write_text(json.dumps({**job, "out": str(out)}))
    reason = run_ranks(module, job_file, num_ranks, scratch / f"{name}.log", timeout_s)
    if out.exists():
        yield from (CheckResult(**line) for line in json.loads(out.read_text()))
    else:
        yield CheckResult(failed.name, FAIL, f"{num_ranks} ranks: {reason or 'they ended without a result'}", failed.remedy)
