"""Policies that a run keeps on its way, for an evaluation over time that takes nothing from the time of training.

``policies/step-N/`` is the policy after N steps as a Hugging Face folder. ``kept.json`` in it, written last, says when:
``{"step": N, "trained_s": seconds}``. A policy is kept by the first step whose update ends at or after a multiple of
``run.keep_policy_every_s``.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config.schema import RunConfig
from megatron_rl.system.files.atomic_files import write_atomic
from megatron_rl.training.trainer_group import TrainerGroup

_FOLDER = "policies"
_NOTE = "kept.json"


@dataclass(frozen=True)
class PolicyExport:
    folder: Path
    step: int
    """Steps done."""
    trained_s: float
    """From the beginning of the first step to the end of the policy's update."""


def policy_exports(output_dir: str | Path) -> list[PolicyExport]:
    """The policies that a run has kept, in the order of its steps; those not written to their end are left out."""
    found = []
    for note in Path(output_dir).glob(f"{_FOLDER}/step-*/{_NOTE}"):
        said = json.loads(note.read_text())
        found.append(PolicyExport(note.parent, int(said["step"]), float(said["trained_s"])))
    return sorted(found, key=lambda kept: kept.step)


class PolicyExporter:
    """Keeps policies when they are due. A run that is resumed drops those of the steps that it repeats."""

    def __init__(self, config: RunConfig, group: TrainerGroup, *, first_step: int) -> None:
        self._every_s = config.keep_policy_every_s
        self._output_dir = Path(config.output_dir)
        self._group = group
        self._kept_s = 0.0
        for kept in policy_exports(config.output_dir):
            if kept.step > first_step:
                shutil.rmtree(kept.folder)
            else:
                self._kept_s = kept.trained_s

    def keep_if_due(self, step: int, trained_s: float) -> None:
        """Collective over the trainer ranks if a policy is due. ``trained_s``: as in KeptPolicy."""
        if not self._every_s or trained_s // self._every_s <= self._kept_s // self._every_s:
            return
        folder = self._output_dir / _FOLDER / f"step-{step + 1}"
        self._group.save_hf("policy", str(folder))
        write_atomic(folder / _NOTE, json.dumps({"step": step + 1, "trained_s": trained_s}))
        self._kept_s = trained_s
