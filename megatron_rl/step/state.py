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
    """The products of a step's stages, named as in the stage table (``schedule/table.py``).

    A field without a default is set by the stage that makes it.
    """

    trajectories: list[Trajectory] = field(default_factory=list)
    """The responses that train in this step; one per sequence of ``batch``."""
    batch: PackedBatch = field(default_factory=lambda: _EMPTY)
    """Prompts and responses so far; ``mask`` is on the tokens that train in this step."""
    slots: list[Trajectory] = field(default_factory=list)
    """All responses that the step worked on, including greedy ones and ones aborted before their first new token, which do
    not train. An empty list means ``trajectories``."""
    finished: list[Trajectory] = field(init=False)
    """Responses that finished in this step, after scoring."""
    old_logprobs: Tensor = field(init=False)
    """[T] float32, on the tokens of the batch's ``mask``; 0 on the sequences of ``first_update`` until that update has run."""
    first_update: Sequence[int] = ()
    """Sequences of the policy's first update whose old log-probs that update itself computes; empty if another pass does."""
    reference_logprobs: Tensor = field(init=False)
    """[T] float32, on the tokens of the batch's ``mask``."""
    teacher_tokens: dict[str, Tensor] = field(default_factory=dict)
    """With algorithm.kl.top_k the fields ``TEACHER_IDS`` and ``TEACHER_LOGPROBS`` of data/batch.py, 0 outside ``mask``."""
    values: Tensor | None = None
    """[T] float32, V(s_t); None without a critic."""
    final_values: Tensor | None = None
    """[N] float32, V after the last token of each trajectory; set together with ``values``."""
    updated_values: Tensor | None = None
    """[T] float32, V(s_t) after the step's updates of the critic; None if the advantages are from ``values``."""
    token_rewards: Tensor | None = None
    """[T] float32, rewards in addition to the outcome: a KL penalty, line rewards."""
    line_rewards: Tensor | None = None
    """[T] float32, rewards at line ends; None without a process reward model."""
    policy_batch: PackedBatch = field(init=False)
    critic_batch: PackedBatch | None = None
    """The critic's sequences; None without a critic, and in a step in which no response finished with a score."""
    is_shared_out: bool = False
    """True once every sequence of the batch is assigned to a replica."""
    pool_state: Callable[[], dict[str, Any]] | None = None
    """Returns the pool's state right after the finished responses left it; None until then."""
    kl_state: dict[str, Any] | None = None
    """The KL controller's state at the same moment."""
    trained_s: float = 0.0
    """Seconds of training at the end of the policy's update."""
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = self.slots or self.trajectories

    @property
    def ended(self) -> list[Trajectory]:
        """Responses that finished in this step, scored or not yet, without greedy ones."""
        return [t for t in self.slots if t.finished and not t.greedy]

    def saved_part(self) -> "StepState":
        """Return the part that a checkpoint of this step needs; the rest may be freed."""
        return StepState(pool_state=self.pool_state, kl_state=self.kl_state, metrics=self.metrics)
