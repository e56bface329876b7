"""The mechanics of the step graph: its stages, the check of a graph, and the stages that may run now. Pure.

A stage waits for products, each at a step distance: 0 is its own step, 1 the previous step, n the n-th step before it, and
-n the n-th step after it, or the run's last step if that is earlier. These distances alone determine how far one step may
and must run ahead of another.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum


class Resource(Enum):
    """A resource that a stage occupies while it runs; each has one stage at a time."""

    rollout = "rollout"
    """The SGLang servers, driven from the asyncio thread."""
    trainer = "trainer"
    """The Megatron ranks; one stage at a time, on the main thread."""
    host = "host"
    """The driver's CPU: rewards and advantages."""


@dataclass(frozen=True)
class Stage:
    """A row of the table as it runs in one mode; a column with several products separates them by spaces."""

    name: str
    resource: Resource
    makes: str
    needs: str = ""
    """Products of the same step."""
    needs_before: str = ""
    """Products of the previous step, of the n-th step before (``x:n``), or of the n-th step after (``x:-n``). Products of steps
    before the run's first step count as given."""
    only_with: str = ""
    """The fact without which the stage does not exist."""
    shares_devices: bool = False
    """The stage has the devices of trainer and servers to itself."""

    @property
    def products(self) -> tuple[str, ...]:
        return tuple(self.makes.split())

    @property
    def waits_for(self) -> tuple[tuple[str, int], ...]:
        """(product, step distance) of every product that must exist before the stage starts."""
        before = (word.partition(":") for word in self.needs_before.split())
        return (
            *((product, 0) for product in self.needs.split()),
            *((product, int(distance or 1)) for product, _, distance in before),
        )

    @property
    def occupies(self) -> frozenset[Resource]:
        return frozenset({Resource.rollout, Resource.trainer} if self.shares_devices else {self.resource})


@dataclass(frozen=True)
class StageRun:
    """One stage of one step."""

    stage: Stage
    step: int


def check_graph(graph: Sequence[Stage], goals: Collection[str] = ()) -> None:
    """Check a graph. Raises ValueError for a duplicate name, a product made twice or never, a step that waits for itself, or a stage
    that leads to none of the stages ``goals`` of its own step, because it could still run after that step's state is deleted."""
    products = [product for stage in graph for product in stage.products]
    for kind, items in (("stage", [stage.name for stage in graph]), ("product", products)):
        duplicate = sorted(item for item, count in Counter(items).items() if count > 1)
        if duplicate:
            raise ValueError(f"stage graph: {kind} {duplicate} is declared twice")
    for stage in graph:
        missing = {product for product, _ in stage.waits_for} - set(products)
        if missing:
            raise ValueError(f"stage graph: {stage.name} needs {sorted(missing)}, which no stage makes")
    _check_for_circles(graph)
    if goals:
        _check_leads_to(graph, goals)


def _check_leads_to(graph: Sequence[Stage], goals: Collection[str]) -> None:
    maker = {product: stage for stage in graph for product in stage.products}
    leading: set[str] = set()
    unseen = [stage for stage in graph if stage.name in goals]
    while unseen:
        leading.add(unseen[-1].name)
        made_by = {maker[product].name: maker[product] for product, distance in unseen.pop().waits_for if distance <= 0}
        unseen += [stage for name, stage in made_by.items() if name not in leading]
    if loose := sorted({stage.name for stage in graph} - leading):
        raise ValueError(f"stage graph: {loose} lead to none of {sorted(goals)}, which end a step; make one of these need their products")


def _check_for_circles(graph: Sequence[Stage]) -> None:
    """Raise ValueError if stages wait for each other over a total distance of 0 or less."""
    maker = {product: stage.name for stage in graph for product in stage.products}
    # Bellman-Ford: with steps of this length, only such a circle gets shorter in every pass.
    step = len(graph) + 1
    length = dict.fromkeys(maker.values(), 0)
    for _ in range(step):
        shorter = {
            stage.name: least
            for stage in graph
            for least in [min((length[maker[p]] + distance * step - 1 for p, distance in stage.waits_for), default=0)]
            if least < length[stage.name]
        }
        length |= shorter
    if shorter:
        raise ValueError(f"stage graph: {sorted(shorter)} wait for each other within one step")


class Frontier:
    """Bookkeeping of the stage runs that may start: ``ready()`` lists them, ``start()`` and ``finish()`` advance.

    If several stages are ready for one resource, the earlier step goes first, then the earlier row. A step opens
    when one of its first stages starts. With a longest distance of n, at most n + 1 steps have stages that have not
    started yet.
    """

    def __init__(self, graph: Sequence[Stage], first_step: int, last_step: int) -> None:
        check_graph(graph)
        self._graph = tuple(graph)
        self._reach = max([1, *(distance for stage in graph for _, distance in stage.waits_for)])
        self._first_step, self._last_step = first_step, last_step
        given = range(first_step - self._reach, first_step)
        self._made = {(product, step) for stage in graph for product in stage.products for step in given}
        self._open = [StageRun(stage, first_step) for stage in graph] if first_step <= last_step else []
        self._newest = min(first_step, last_step)
        self._running: list[StageRun] = []

    @property
    def done(self) -> bool:
        return not self._open and not self._running and self._newest >= self._last_step

    @property
    def running(self) -> tuple[StageRun, ...]:
        return tuple(self._running)

    def ready(self) -> list[StageRun]:
        """Return the runs that may start now, in order of precedence, at most one for each free resource."""
        busy = {resource for run in self._running for resource in run.stage.occupies}
        found: list[StageRun] = []
        for run in self._candidates():
            if busy.isdisjoint(run.stage.occupies) and self._has_needs(run):
                busy |= run.stage.occupies
                found.append(run)
        return found

    def start(self, run: StageRun) -> None:
        if run.step > self._newest:
            self._newest = run.step
            self._open += [StageRun(stage, run.step) for stage in self._graph]
        self._open.remove(run)
        self._running.append(run)

    def finish(self, run: StageRun) -> None:
        self._running.remove(run)
        self._made.update((product, run.step) for product in run.stage.products)
        # The oldest open step is newest - reach and needs products at most reach steps back, so older products can go.
        self._made = {(product, step) for product, step in self._made if step >= self._newest - 2 * self._reach}

    def stop_after(self, step: int) -> None:
        """Open no step after ``step``; a later step that is already open still completes."""
        self._last_step = min(self._last_step, max(step, self._newest))

    def finish_open_steps(self, lasting: Collection[str], keeper: str, left_out: Collection[str] = ()) -> frozenset[StageRun]:
        """Drop the stage runs that the last checkpoint before the end does not need; return the running ones that it needs.

        That checkpoint is of the newest step in which a stage that makes one of ``lasting`` (the updated weights) has started.
        Needed are the runs of all products that the stage ``keeper``, which stores the checkpoint, waits for, except ``left_out``.
        """
        makes_them = [stage for stage in self._graph if not set(lasting).isdisjoint(stage.products)]
        begun = [
            step
            for step in range(self._first_step, self._newest + 1)
            if any(StageRun(stage, step) not in self._open for stage in makes_them)
        ]
        keepers = [StageRun(stage, begun[-1]) for stage in self._graph if begun and stage.name == keeper]
        needed = self._unfinished_needs(keepers, left_out)
        self._newest = max([self._newest, *(run.step for run in needed)])
        self._last_step = self._newest
        still_running = needed.intersection(self._running)
        waiting = needed - still_running
        steps = range(self._first_step, self._newest + 1)
        self._open = [run for step in steps for stage in self._graph if (run := StageRun(stage, step)) in waiting]
        return frozenset(still_running)

    def _unfinished_needs(self, goals: Iterable[StageRun], left_out: Collection[str]) -> set[StageRun]:
        """Return the unfinished runs that ``goals`` need in order to start, ignoring the products ``left_out``."""
        maker = {product: stage for stage in self._graph for product in stage.products}
        found: set[StageRun] = set()
        unseen = list(goals)
        while unseen:
            missing = set(self._waits_for(unseen.pop())) - self._made
            new = {StageRun(maker[product], step) for product, step in missing if product not in left_out} - found
            found |= new
            unseen += new
        return found

    def _candidates(self) -> Iterable[StageRun]:
        yield from self._open
        may_open = self._newest < self._last_step
        if may_open and not any(run.step <= self._newest - self._reach for run in self._open):
            firsts = (s for s in self._graph if all(distance > 0 for _, distance in s.waits_for))
            yield from (StageRun(stage, self._newest + 1) for stage in firsts)

    def _has_needs(self, run: StageRun) -> bool:
        return self._made.issuperset(self._waits_for(run))

    def _waits_for(self, run: StageRun) -> list[tuple[str, int]]:
        """Return the (product, step) pairs that ``run`` waits for; a step after the last step of training counts as the last one."""
        return [(product, min(run.step - distance, self._last_step)) for product, distance in run.stage.waits_for]
