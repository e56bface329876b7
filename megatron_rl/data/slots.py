"""The slot pool: a constant number of responses in progress (T-PPO's successive batching, arXiv 2506.15050).

Laws: every step works on exactly ``num_slots`` trajectories; unfinished ones come first, in the order in which they
were started, and fresh prompts fill the rest; a trajectory leaves only when it is finished or discarded by name; none
is lost or doubled.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from megatron_rl.data.sampler import PromptSampler
from megatron_rl.data.trajectory import Prompt, Trajectory


class _StartTrajectory(Protocol):
    """Makes a response that has not begun."""

    def __call__(self, prompt: Prompt, id: int, *, group_id: int, sample_index: int) -> Trajectory: ...


class SlotPool:
    def __init__(
        self, sampler: PromptSampler, start: _StartTrajectory, *, num_slots: int, num_samples_per_prompt: int
    ) -> None:
        self._sampler = sampler
        self._start = start
        self._num_slots = num_slots
        self._num_samples = num_samples_per_prompt
        self._slots: list[Trajectory] = []
        self._fresh: deque[Trajectory] = deque()
        self._next_id = 0
        self._next_group = 0

    def fill(self, step: int = 0) -> list[Trajectory]:
        """The trajectories of ``step``: carried ones, then fresh ones; always num_slots of them."""
        while len(self._slots) < self._num_slots:
            if not self._fresh:
                self._start_group(self._sampler.draw(step))
            self._slots.append(self._fresh.popleft())
        return list(self._slots)

    def release_finished(self) -> list[Trajectory]:
        """Take the finished trajectories out of the pool."""
        finished = [t for t in self._slots if t.finished]
        self._slots = [t for t in self._slots if not t.finished]
        return finished

    def discard(self, trajectories: Iterable[Trajectory]) -> None:
        """Take these out, finished or not; those that left already are passed over."""
        ids = {t.id for t in trajectories}
        self._slots = [t for t in self._slots if t.id not in ids]

    @property
    def num_carried(self) -> int:
        return sum(1 for t in self._slots if t.segments)

    @property
    def prompts(self) -> list[Prompt]:
        """Those of the responses in progress and of those that come next."""
        return [trajectory.prompt for trajectory in (*self._slots, *self._fresh)]

    def _start_group(self, prompt: Prompt) -> None:
        for sample_index in range(self._num_samples):
            self._fresh.append(self._start(prompt, self._next_id, group_id=self._next_group, sample_index=sample_index))
            self._next_id += 1
        self._next_group += 1

    def state(self) -> dict[str, Any]:
        """JSON-ready; contains mid-response trajectories whole."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """What gives the ``state`` of this moment later on. Cheap: tokens are shared, so it may be taken every step."""
        slots, fresh, rest = [t.copy() for t in self._slots], [t.copy() for t in self._fresh], self.position()
        return lambda: {"slots": [t.to_dict() for t in slots], "fresh": [t.to_dict() for t in fresh], **rest}

    def position(self) -> dict[str, Any]:
        """The part of ``state`` that says which prompts and ids come next."""
        return {"sampler": self._sampler.state(), "next_id": self._next_id, "next_group": self._next_group}

    def load_state(self, state: dict[str, Any]) -> None:
        self._sampler.load_state(state["sampler"])
        self._slots = [Trajectory.from_dict(t) for t in state["slots"]]
        self._fresh = deque(Trajectory.from_dict(t) for t in state["fresh"])
        self._next_id, self._next_group = state["next_id"], state["next_group"]
