"""The optimizer and its learning rate, for every model that is trained."""

from dataclasses import dataclass
from enum import Enum

from megatron_rl.config.schema.bounds import above, at_least, below_one


class DecayStyle(Enum):
    """Decay of the learning rate from lr to min_lr."""

    constant = "constant"
    """No decay: lr after the warm-up."""
    linear = "linear"
    """A straight line over decay_steps."""
    cosine = "cosine"
    """Half a cosine over decay_steps."""


class Moments(Enum):
    """Precision of Adam's two moments, in memory and in checkpoints."""

    float32 = "float32"
    """12 bytes per parameter, main weights included."""
    bfloat16 = "bfloat16"
    """8 bytes per parameter, for bfloat16 models on GPUs with Transformer Engine. Updates differ by the rounding, a 256th
    of a moment."""


@dataclass
class OptimizerConfig:
    """AdamW (Megatron's distributed optimizer) and its learning rate."""

    lr: float = above(0, default=1.0e-6)
    """Learning rate after the warm-up, the largest of the run."""
    min_lr: float = at_least(0, default=0.0)
    """Learning rate at the end of the decay; at most lr."""
    warmup_steps: int = at_least(0, default=0)
    """Updates of linear warm-up."""
    decay_style: DecayStyle = DecayStyle.constant
    """Decay of the learning rate from lr to min_lr."""
    decay_steps: int = at_least(0, default=0)
    """Updates until min_lr is reached; required by linear and cosine."""
    weight_decay: float = at_least(0, default=0.1)
    """Decoupled weight decay, multiplied by the learning rate."""
    beta1: float = below_one(default=0.9)
    """Decay of the mean of gradients, per update."""
    beta2: float = below_one(default=0.95)
    """Decay of the mean of squared gradients, per update."""
    eps: float = above(0, default=1.0e-8)
    """Term added to the root of the mean squared gradient."""
    max_grad_norm: float = above(0, default=1.0)
    """Gradients with a larger norm over the whole model are scaled down to this norm."""
    moments: Moments = Moments.float32
    """Precision of Adam's two moments."""
