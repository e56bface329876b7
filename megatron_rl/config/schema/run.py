"""The run itself: its folder and length, its schedule, evaluation and tracking."""

from dataclasses import dataclass
from enum import Enum


@dataclass
class RunConfig:
    output_dir: str = "outputs/run"
    """Everything the run writes lies under this folder."""
    num_steps: int = 100
    """Steps of the training loop in all (a resumed run continues up to this number)."""
    seed: int = 1
    resume: bool = False
    """Continue from the newest checkpoint under output_dir."""
    overwrite: bool = False
    """Allow a run to start over in a folder that already holds one."""
    save_every_steps: int = 0
    """Write a checkpoint every so many steps; 0 means only at the end."""


class Mode(Enum):
    sync = "sync"
    """Full responses; nothing overlaps (the PPO baseline)."""
    tppo = "tppo"
    """One window a step; the critic update runs while the next window is generated."""


@dataclass
class ScheduleConfig:
    mode: Mode = Mode.tppo


@dataclass
class EvalConfig:
    every_steps: int = 0
    """Evaluate on eval_files every so many steps; 0 means only before and after."""
    num_prompts: int = 0
    """0 means all of them."""
    temperature: float = 0.0
    stop_at_accuracy: float = 0.0
    """End the run once the accuracy reaches this; 0 means never."""


@dataclass
class TrackingConfig:
    mlflow: bool = True
    mlflow_uri: str = ""
    """Empty: a SQLite store in the output folder."""
    experiment: str = "megatron_rl"
    report_every_steps: int = 20
    """Rewrite report.html every so many steps (and at the end)."""
