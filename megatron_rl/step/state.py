"""The products that the stages of one step hand to each other; stages of different steps share only the run's components."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_rl.data.batch import PackedBatch
from megatron_rl.data.trajectory import Trajectory

_EMPTY = PackedBatch(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), {})


@dataclass(repr=False, eq=False)
class StepState:
    """The products of a step's stages, named as in the table. A field without a default exists once a stage has made it."""

    trajectories: list[Trajectory] = field(default_factory=list)
    """The rows of ``batch``: what grew in this step and trains."""
    batch: PackedBatch = field(default_factory=lambda: _EMPTY)
    """Prompts and responses so far; ``mask`` is on the tokens of this step's window."""
    slots: list[Trajectory] = field(default_factory=list)
    """All responses that the step worked on: also those aborted before their first new token, and greedy ones, which train
    nothing; empty: as ``trajectories``."""
    finished: list[Trajectory] = field(init=False)
    """Finished in this step, and scored."""
    old_logprobs: Tensor = field(init=False)
    """[T] float32, where the batch's ``mask`` is on; those of ``first_update`` are 0 until it has been made."""
    first_update: Sequence[int] = ()
    """Sequences of the policy's first update, where its own log-probs are the old ones and no other pass gives them."""
    reference_logprobs: Tensor = field(init=False)
    """[T] float32, likewise."""
    values: Tensor | None = None
    """[T] float32, V(s_t); None without a critic."""
    final_values: Tensor | None = None
    """[N] float32, V after the last token of each trajectory; made with ``values``."""
    line_rewards: Tensor | None = None
    """[T] float32; None without a process reward model."""
    policy_batch: PackedBatch = field(init=False)
    critic_batch: PackedBatch | None = None
    """The critic's sequences; None without a critic, and in a step without a finished, scored response."""
    is_shared_out: bool = False
    """The trainer's replicas know which of the batch's sequences each of them works on."""
    pool_state: Callable[[], dict[str, Any]] | None = None
    """Gives the pool as it was when the finished responses had left it; None until then."""
    kl_state: dict[str, Any] | None = None
    """The KL controller's state at the same moment."""
    trained_s: float = 0.0
    """Seconds of training at the end of the policy's update."""
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = self.slots or self.trajectories

    @property
    def ended(self) -> list[Trajectory]:
        """Finished in this step, scored or not yet; greedy responses aside."""
        return [t for t in self.slots if t.finished and not t.greedy]

    def saved_part(self) -> "StepState":
        """The part that a checkpoint of this step needs; the rest may be forgotten."""
        return StepState(pool_state=self.pool_state, kl_state=self.kl_state, metrics=self.metrics)
