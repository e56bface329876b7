"""Finds quantities of a replayed step that deviate from the record. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
