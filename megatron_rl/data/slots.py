"""The slot pool: a constant number of responses in progress (T-PPO's successive batching, arXiv 2506.15050).

Laws: every step works on exactly ``num_slots`` trajectories: unfinished trajectories first, in the order of their
start, then fresh prompts; a trajectory leaves only when it is finished or discarded; none is lost or duplicated. A
finished trajectory frees its slot from the next step on, but stays in the pool, and in checkpoints, until it is
released: a step may be generated before the previous step has trained.

Prompts of some types may have fewer samples. Groups of one size start together in a *block*, which has as many
samples as the largest group. So an empty pool is filled with whole groups, and the prompts of one size start in the
order of their draws; the first groups of a block wait for the others.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from megatron_rl.data.sampler import PromptSampler
from megatron_rl.data.trajectory import Prompt, Trajectory
from megatron_rl.errors import DataError


class SlotPool:
    """The pool of responses in progress, each in one of ``num_slots`` slots.

    ``num_samples_by_type``: samples per prompt, for the prompt types that differ from ``num_samples_per_prompt``.
    Every number of samples divides the largest number, which divides ``num_slots``.
    """

    def __init__(
        self,
        sampler: PromptSampler,
        start: Callable[..., Trajectory],
        *,
        num_slots: int,
        num_samples_per_prompt: int,
        num_samples_by_type: Mapping[str, int] | None = None,
        holds_groups: bool = False,
    ) -> None:
        """``start(prompt, id, group_id=..., sample_index=...)`` makes a response without tokens.

        ``holds_groups``: a finished response is released once all responses of its group have finished.
        """
        self._holds_groups = holds_groups
        self._sampler = sampler
        self._start = start
        self._num_slots = num_slots
        self._num_samples = num_samples_per_prompt
        self._by_type = dict(num_samples_by_type or {})
        self._block_size = max(num_samples_per_prompt, *self._by_type.values(), 1)
        self._waiting: dict[int, list[Trajectory]] = {}
        """Groups that wait until their block is full, keyed by number of samples."""
        self._slots: list[Trajectory] = []
        self._fresh: deque[Trajectory] = deque()
        self._next_id = 0
        self._next_group = 0
        self.newest_generated = -1
        """The newest step whose tokens are all generated."""

    def fill(self, step: int = 0) -> list[Trajectory]:
        """Return the ``num_slots`` trajectories of ``step``: unfinished ones, then new ones, which start here."""
        slots = [t for t in self._slots if not _ended_by(t, step - 1)]
        if step < self.newest_generated:  # restored with later windows, in which other responses have started
            return [t for t in slots if t.segments and t.segments[0].step <= step]
        num_free = self._num_slots - sum(t.parent < 0 for t in slots)
        for _ in range(num_free):
            if not self._fresh:
                self._start_block(step)
            slots.append(self._fresh.popleft())
            self._slots.append(slots[-1])
        return slots

    def open_row(self, first: Trajectory, token_ids: Sequence[int]) -> Trajectory:
        """Add another row of the episode whose first row is ``first``. The row needs no slot: it shares that one's."""
        row = first.further_row(self._next_id, token_ids)
        self._next_id += 1
        self._slots.append(row)
        return row

    def release_finished(self, step: int | None = None) -> list[Trajectory]:
        """Remove and return the trajectories that have finished, in ``step`` or before if given.

        With ``holds_groups``, only members of groups whose responses have all finished.
        """
        whole = {t.group_id for group in self._whole_groups(step) for t in group}
        leaves = {t.id for t in self._slots if _ended_by(t, step) and (not self._holds_groups or t.group_id in whole)}
        finished = [t for t in self._slots if t.id in leaves]
        self._slots = [t for t in self._slots if t.id not in leaves]
        return finished

    def ended_groups(self, step: int) -> list[list[Trajectory]]:
        """Groups whose last response ended in ``step``, in the order of their start."""
        return [group for group in self._whole_groups(step) if any(t.segments[-1].step == step for t in group)]

    def _whole_groups(self, step: int | None) -> list[list[Trajectory]]:
        """Groups whose responses are all in the pool and finished, in ``step`` or before if given."""
        groups: dict[int, list[Trajectory]] = {}
        for t in self._slots:
            if _ended_by(t, step):
                groups.setdefault(t.group_id, []).append(t)
        open_ = {t.group_id for t in self._slots if not _ended_by(t, step)}

        def is_whole(group: list[Trajectory]) -> bool:
            return group[0].group_id not in open_ and sum(t.parent < 0 for t in group) == self._group_size(group[0].prompt)

        return [group for group in groups.values() if is_whole(group)]

    def discard(self, trajectories: Iterable[Trajectory]) -> None:
        """Remove these trajectories, finished or not; those that are not in the pool are ignored."""
        ids = {t.id for t in trajectories}
        self._slots = [t for t in self._slots if t.id not in ids]

    @property
    def prompts(self) -> list[Prompt]:
        """Prompts of the responses in progress and of the next ones."""
        return [trajectory.prompt for trajectory in (*self._slots, *self._fresh, *chain(*self._waiting.values()))]

    def _start_block(self, step: int) -> None:
        """Draw prompts until groups of equal size fill a block, whose responses are then the next to start. Groups of other sizes wait."""
        while True:
            prompt = self._sampler.draw(step)
            size = self._group_size(prompt)
            waiting = self._waiting.setdefault(size, [])
            waiting += self._new_group(prompt, size)
            if len(waiting) == self._block_size:
                self._fresh.extend(self._waiting.pop(size))
                return

    def _new_group(self, prompt: Prompt, size: int) -> list[Trajectory]:
        first, group = self._next_id, self._next_group
        self._next_id, self._next_group = first + size, group + 1
        return [self._start(prompt, first + i, group_id=group, sample_index=i) for i in range(size)]

    def _by_size(self, waiting: Sequence[Trajectory]) -> dict[int, list[Trajectory]]:
        """Waiting groups of a checkpoint by size. Raises DataError if their sizes differ from the present ones."""
        found: dict[int, list[Trajectory]] = {}
        members = Counter(t.group_id for t in waiting)
        for t in waiting:
            size = self._group_size(t.prompt)
            if members[t.group_id] != size or self._block_size % size:
                raise DataError(
                    f"batch.num_samples_by_type: in the checkpoint {members[t.group_id]} responses to a prompt of type "
                    f"{t.prompt.type!r} wait, but it has {size} now; resume with the earlier numbers, or start a new run"
                )
            found.setdefault(size, []).append(t)
        return found

    def _group_size(self, prompt: Prompt) -> int:
        return self._by_type.get(prompt.type, self._num_samples)

    def state(self) -> dict[str, Any]:
        """State as JSON values and arrays; contains unfinished trajectories."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Return a function that yields the ``state`` of this moment later. Cheap: tokens are shared, so every step may take one."""
        kept = {"slots": self._slots, "fresh": self._fresh, "waiting": chain(*self._waiting.values())}
        # Copied now, because later windows extend the same responses.
        copies = {name: [t.copy() for t in held] for name, held in kept.items()}
        rest = {"newest_generated": self.newest_generated, **self.position()}

        def state() -> dict[str, Any]:
            # A prompt is written once for all of its samples.
            prompts = {id(t.prompt): t.prompt for t in chain(*copies.values())}
            places = {key: index for index, key in enumerate(prompts)}
            held = {name: [t.to_dict(places[id(t.prompt)]) for t in own] for name, own in copies.items()}
            return {"prompts": [prompt.to_dict() for prompt in prompts.values()], **held, **rest}

        return state

    def position(self) -> dict[str, Any]:
        """The part of ``state`` that determines the next prompts and ids."""
        return {"sampler": self._sampler.state(), "next_id": self._next_id, "next_group": self._next_group}

    def load_state(self, state: dict[str, Any]) -> None:
        self._sampler.load_state(state["sampler"])
        prompts = [Prompt.from_dict(prompt) for prompt in state.get("prompts", ())]
        self._slots = [Trajectory.from_dict(t, prompts) for t in state["slots"]]
        self._fresh = deque(Trajectory.from_dict(t, prompts) for t in state["fresh"])
        self._waiting = self._by_size([Trajectory.from_dict(t, prompts) for t in state.get("waiting", ())])
        self._next_id, self._next_group = state["next_id"], state["next_group"]
        self.newest_generated = state.get("newest_generated", -1)


def _ended_by(trajectory: Trajectory, step: int | None) -> bool:
    """True if the trajectory finished in ``step`` or before; with None, if it finished at all."""
    return trajectory.finished and (step is None or trajectory.segments[-1].step <= step)


def full_blocks(groups: Iterable[Sequence[Trajectory]], block_size: int) -> list[list[Trajectory]]:
    """Blocks of ``block_size`` samples, made of whole groups of one size in their order; the remainder is omitted."""
    blocks = []
    open_: dict[int, list[Trajectory]] = {}
    for group in groups:
        block = open_.setdefault(len(group), [])
        block += group
        if len(block) == block_size:
            blocks.append(open_.pop(len(group)))
    return blocks
