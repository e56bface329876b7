"""Replays the recorded steps of a released recipe, and says where this installation departs from them.

The recipe, its models and its prompts are made from a seed (``check_task.py``). Every stage gets the prompts and
sampled tokens of the record, and its result is compared with the record: exactly for quantities without floating
point, otherwise within the tolerance of the device (``check_compare.py``). The servers score the record's tokens
instead of sampling, because a sampled token depends on the last bit of a log-prob.
"""

import asyncio
import json
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.desk.doctor.check_compare import Deviation, departures, describe
from megatron_rl.desk.doctor.check_task import NUM_STEPS, make_task
from megatron_rl.errors import UserError
from megatron_rl.system.command_line.terminal import say
from megatron_rl.system.processes.signals import clean_stop

if TYPE_CHECKING:
    from megatron_rl.config.schema import Config
    from megatron_rl.desk.doctor.trainer_and_servers import WaitFor

_LIBRARIES = ("torch", "megatron-core", "sglang", "transformers", "numpy")
_MAX_SHOWN = 12
_FORMAT = 1


def check_installation(against: Path, record_path: Path | None, overrides: Sequence[str], *, trainer_only: bool) -> int:
    """Compare with the record ``against``, or make the record ``record_path``; returns the exit status."""
    if record_path and trainer_only:
        raise UserError("check: --record needs servers to sample its tokens; remove --trainer-only")
    record = {} if record_path else _read(against)
    with clean_stop(), tempfile.TemporaryDirectory(prefix="megatron-rl-check-") as scratch:
        from megatron_rl.config.checks import check_config
        from megatron_rl.config.load import load_config

        config = load_config([make_task(Path(scratch))], overrides)
        check_config(config, command="train")
        if config.parallel.num_ranks > 1:
            raise UserError("check: parallel.num_ranks: expected 1; `megatron-rl doctor --invariance` compares layouts")
        if record_path:
            made = _made(config, None, with_servers=True)
            record_path.write_text(json.dumps(made) + "\n")
            print(f"{record_path}: {NUM_STEPS} steps recorded")
            return 0
        made = _made(config, record, with_servers=not trainer_only)
    return _report(made, record)


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"check --against: {path} cannot be read: {error}; `megatron-rl check --record FILE` writes one") from error
    if not isinstance(record, dict) or record.get("format") != _FORMAT or len(record.get("steps", ())) != NUM_STEPS:
        raise UserError(f"check --against: {path} is not a record of this version; write one with `megatron-rl check --record FILE`")
    return record


def _report(made: Mapping[str, Any], record: Mapping[str, Any]) -> int:
    """Print the result. Returns the exit status."""
    import torch

    on_gpu = torch.cuda.is_available()
    deviations = list(_all_departures(made, record, on_gpu=on_gpu))
    device = "a GPU" if on_gpu else "a CPU"
    here = made["made_with"]
    others = [f"{name} {here.get(name)} (record: {was})" for name, was in record["made_with"].items() if here.get(name) != was]
    versions = f"other versions: {', '.join(others)}" if others else "the record's versions"
    print(f"replayed {NUM_STEPS} recorded steps on {device}, with {versions}")
    if on_gpu:
        print("tolerances on GPUs are estimates: this check was not run on GPUs before the release; small deviations may be normal")
    if not deviations:
        print("this installation computes what the release computed")
        return 0
    lines = describe(deviations)
    print(f"first deviation: {lines[0]}")
    for line in lines[1:_MAX_SHOWN]:
        print(f"  then {line}")
    if len(lines) > _MAX_SHOWN:
        print(f"  and {len(lines) - _MAX_SHOWN} more")
    return 1


def _all_departures(made: Mapping[str, Any], record: Mapping[str, Any], *, on_gpu: bool) -> Iterator[Deviation]:
    """Yields all deviations in the order in which steps and stages run."""
    yield from departures(0, "start", made["start"], record["start"], on_gpu=on_gpu)
    for index, (ours, theirs) in enumerate(zip(made["steps"], record["steps"], strict=True)):
        for stage in theirs["stages"]:
            recorded = theirs["stages"][stage]
            # With --trainer-only, server log-probs do not exist.
            # With --trainer-only, server log-probs do not exist.
            if stage == "generate" and "server log-probs" not in ours["stages"].get(stage, {}):
                recorded = {name: value for name, value in recorded.items() if name != "server log-probs"}
            yield from departures(index + 1, stage, ours["stages"].get(stage, {}), recorded, on_gpu=on_gpu)


def _made(config: "Config", record: Mapping[str, Any] | None, *, with_servers: bool) -> dict[str, Any]:
    """Results of this installation on the record's tokens, or, without a record, on tokens that its servers sample."""
    from megatron_rl.desk.doctor.step_replay import RecordedServers, replay, weight_fingerprints
    from megatron_rl.step.run_inputs import make_inputs
    from megatron_rl.training.build_engines import rl_engines
    from megatron_rl.training.trainer_ranks import trainer_ranks

    made: dict[str, Any] = {"format": _FORMAT, "made_with": _versions(), "start": {}, "steps": []}
    with trainer_ranks(config, rl_engines(config)) as group, ExitStack() as stack:
        assert group is not None, "one rank"
        inputs = make_inputs(config)
        rollout: Any = RecordedServers([step["window"] for step in record["steps"]]) if record else None
        wait_for: WaitFor = asyncio.run
        scorer: Any = None
        if with_servers:
            from megatron_rl.desk.doctor.trainer_and_servers import temporary_servers

            service, wait_for = stack.enter_context(temporary_servers(config, group, inputs.tokenizer, note=say))
            if record:
                from megatron_rl.desk.doctor.check_servers import ScoringServers

                rollout = scorer = ScoringServers(rollout.windows, service=service)
            else:
                rollout = service
            service.publish()
        made["start"] = weight_fingerprints(group, "policy")
        for step, stage, quantities, window in replay(config, group, inputs, rollout, NUM_STEPS, wait_for):
            say(f"step {step + 1} of {NUM_STEPS}: {stage}")
            if stage == "generate":
                made["steps"].append({"window": window, "stages": {}})
                quantities |= {"server log-probs": scorer.logprobs if scorer else _means(window)} if with_servers else {}
            if quantities:
                made["steps"][step]["stages"][stage] = quantities
    return made


def _means(window: Mapping[str, Mapping[str, Any]]) -> list[float]:
    return [sum(one["logprobs"]) / len(one["logprobs"]) for one in window.values()]


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    return versions
