"""Replays the recorded steps of a released recipe, and says where this installation departs from them.

The recipe, its models and its prompts are made from a seed (``check_task.py``). Every stage gets the prompts and
sampled tokens of the record, and its result is compared with the record: exactly for quantities without floating
point, otherwise within the tolerance of the device. The servers score the record's tokens
instead of sampling, because a sampled token depends on the last bit of a log-prob.
"""

import asyncio
import json
import math
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.data.trajectory import Trajectory
from megatron_rl.desk.doctor.check_task import NUM_STEPS, make_task
from megatron_rl.desk.doctor.machine_checks import LIBRARIES, installed_version
from megatron_rl.desk.doctor.step_replay import RecordedServers, replay, weight_fingerprints
from megatron_rl.errors import UserError
from megatron_rl.rollout.served_reference import served_logprobs
from megatron_rl.rollout.service import RolloutService
from megatron_rl.system.command_line.terminal import say
from megatron_rl.system.processes.signals import clean_stop

if TYPE_CHECKING:
    from megatron_rl.config.schema import Config
    from megatron_rl.desk.doctor.trainer_and_servers import WaitFor

Numbers = Sequence[float]
_STAGE_LABELS = {
    "start": "the models as they were loaded",
    "generate": "prompts and servers",
    "score": "the reward",
    "values": "the critic's forward pass",
    "old_logprobs": "the policy's forward pass",
    "advantages": "the advantages",
    "update_policy": "the policy's loss and gradient",
    "publish": "the policy's optimizer step",
    "update_critic": "the critic's loss and gradient",
}
_EXACT = {"prompts", "rewards", "policy lr", "critic lr"}
_ON_CPU = {"weights": 1e-4, "gradient norm": 1e-3, "loss": 1e-3, "": 2e-4}
_ON_GPU = {"weights": 1e-3, "gradient norm": 0.02, "loss": 0.02, "": 0.02}
"""Tolerances relative to the largest recorded value, keyed by prefix or suffix of the quantity's name.

Those for GPUs are estimates, not measured: Transformer Engine computes float32 with 11-bit products, whose rounding of 5e-4
grows over layers and steps by an unknown factor, assumed to be 40."""
_WEIGHTS = "weights "
_MAX_SHOWN = 12
_FORMAT = 1
_SMALLEST = 1e-6
"""Smallest scale of a comparison, for quantities whose values are all about zero."""


@dataclass(frozen=True)
class Deviation:
    """A quantity of a replayed step that deviates from the record."""

    step: int
    """Step, counted from 1; 0 means before the first step."""
    stage: str
    quantity: str
    found: str

    def __str__(self) -> str:
        when = f"step {self.step}" if self.step else "before the first step"
        return f"{when}, {_STAGE_LABELS.get(self.stage, self.stage)}: {self.quantity} {self.found}"


def departures(step: int, stage: str, made: Mapping[str, Any], recorded: Mapping[str, Any], *, on_gpu: bool) -> Iterator[Deviation]:
    """Deviations of one stage, by quantity. ``step`` counts from 1. A quantity that only one side has also deviates."""
    for name in [*recorded, *(name for name in made if name not in recorded)]:
        if name not in made or name not in recorded:
            yield Deviation(step, stage, name, "is not computed here" if name in recorded else "is not in the record")
            continue
        if found := _difference(made[name], recorded[name], tolerance(name, on_gpu=on_gpu)):
            yield Deviation(step, stage, name, found)


def tolerance(name: str, *, on_gpu: bool) -> float:
    """Relative tolerance of the quantity ``name``."""
    if name in _EXACT:
        return 0.0
    bounds = _ON_GPU if on_gpu else _ON_CPU
    return next(bound for words, bound in bounds.items() if name.startswith(words) or name.endswith(words))


def _difference(made: str | Numbers, recorded: str | Numbers, bound: float) -> str:
    """Description of the deviation, or an empty string if there is none."""
    if isinstance(made, str) or isinstance(recorded, str):
        return "" if made == recorded else f"differ ({made} instead of {recorded})"
    if len(made) != len(recorded):
        return f"are {len(made)} instead of {len(recorded)}"
    # Compare relative to the largest value, because small values carry the rounding of large ones.
    scale = max([_SMALLEST, *(abs(value) for value in recorded)])
    off = [abs(a - b) if math.isfinite(a) else math.inf for a, b in zip(made, recorded, strict=True)]
    worst = max(range(len(off)), key=off.__getitem__, default=0)
    if not off or off[worst] <= bound * scale:
        return ""
    which = f" (value {worst + 1} of {len(off)})" if len(off) > 1 else ""
    numbers = f"{made[worst]:.7g} instead of {recorded[worst]:.7g}{which}"
    if not bound:
        return f"{numbers}; it must be equal"
    return f"{numbers}, {off[worst] / scale:.1e} of the largest; the tolerance is {bound:.0e}"


def describe(found: Sequence[Deviation]) -> list[str]:
    """Describe the deviations in one line each; all weights of a step share a line."""
    lines: dict[tuple[int, str], str] = {}
    numbers: dict[tuple[int, str], int] = {}
    for departure in found:
        # A wrong update changes every tensor, so one line for all weights is enough.
        kind = _WEIGHTS if departure.quantity.startswith(_WEIGHTS) else departure.quantity
        key = (departure.step, f"{departure.stage} {kind}")
        lines.setdefault(key, str(departure))
        numbers[key] = numbers.get(key, 0) + 1
    return [line + (f" (and {numbers[key] - 1} more tensors)" if numbers[key] > 1 else "") for key, line in lines.items()]


@dataclass
class ScoringServers(RecordedServers):
    """Replays the record's tokens; ``logprobs`` are the servers' means per sequence, over the newest step's tokens."""

    service: RolloutService | None = None
    logprobs: list[float] = field(default_factory=list)

    async def generate(
        self, trajectories: Sequence[Trajectory], *, step: int, window_tokens: int, is_enough: Any = None, open_row: Any = None
    ) -> dict[int, float]:
        await super().generate(trajectories, step=step, window_tokens=window_tokens)
        grown = [t for t in trajectories if t.window_tokens(step)]
        assert self.service is not None, "given with the first publish"
        server, sequences = self.service.addresses()[0], [(t.token_ids, len(t.token_ids) - t.window_tokens(step)) for t in grown]
        scored = await served_logprobs(server.url, [(np.asarray(ids), first) for ids, first in sequences], api_key=server.api_key)
        self.logprobs = [sum(scores.logprobs.tolist()) / len(scores.logprobs) for scores in scored]
        return {}

    def publish(self) -> Any:
        super().publish()
        assert self.service is not None, "given with the first publish"
        return self.service.publish()


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
            if stage == "generate" and "server log-probs" not in ours["stages"].get(stage, {}):
                recorded = {name: value for name, value in recorded.items() if name != "server log-probs"}
            yield from departures(index + 1, stage, ours["stages"].get(stage, {}), recorded, on_gpu=on_gpu)


def _made(config: "Config", record: Mapping[str, Any] | None, *, with_servers: bool) -> dict[str, Any]:
    """Results of this installation on the record's tokens, or, without a record, on tokens that its servers sample."""
    from megatron_rl.step.run_inputs import make_inputs
    from megatron_rl.training.trainer_ranks import rl_engines, trainer_ranks

    versions = {"python": platform.python_version(), **{name: installed_version(name) or "none" for name in LIBRARIES}}
    made: dict[str, Any] = {"format": _FORMAT, "made_with": versions, "start": {}, "steps": []}
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
