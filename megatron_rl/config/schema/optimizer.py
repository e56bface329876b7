"""The optimizer and its learning rate, for every model that is trained."""

from dataclasses import dataclass
from enum import Enum


class DecayStyle(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass
class OptimizerConfig:
    lr: float = 1.0e-6
    min_lr: float = 0.0
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    decay_style: DecayStyle = DecayStyle.constant
    decay_steps: int = 0
    """Optimizer steps until min_lr is reached; required by linear and cosine."""
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1.0e-8
    max_grad_norm: float = 1.0
