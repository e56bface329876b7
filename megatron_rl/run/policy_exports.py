"""Exports policies during a run, so that they can be evaluated over time without spending training time.

``policies/step-N/`` is the policy after N steps as a Hugging Face folder. ``kept.json`` in it, written last,
records when: ``{"step": N, "trained_s": seconds}``. A policy is exported at the first step whose update ends at or
after a multiple of ``run.keep_policy_every_s``.
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
    """A policy that a run has exported."""

    folder: Path
    step: int
    """Number of steps done."""
    trained_s: float
    """Seconds from the start of the first step to the end of the policy's update."""


def policy_exports(output_dir: str | Path) -> list[PolicyExport]:
    """The policies that a run has exported, by step; incomplete exports are omitted."""
    policies = []
    for note in Path(output_dir).glob(f"{_FOLDER}/step-*/{_NOTE}"):
        record = json.loads(note.read_text())
        policies.append(PolicyExport(note.parent, int(record["step"]), float(record["trained_s"])))
    return sorted(policies, key=lambda kept: kept.step)


class PolicyExporter:
    """Exports policies when they are due. A resumed run deletes the exports of steps that it repeats."""

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
        """Export the policy if it is due, collectively over the trainer ranks. ``trained_s``: as in PolicyExport."""
        # Due once per multiple of the interval, regardless of where in it the step ends.
        if not self._every_s or trained_s // self._every_s <= self._kept_s // self._every_s:
            return
        folder = self._output_dir / _FOLDER / f"step-{step + 1}"
        self._group.save_hf("policy", str(folder))
        write_atomic(folder / _NOTE, json.dumps({"step": step + 1, "trained_s": trained_s}))
        self._kept_s = trained_s
