"""The training step as a graph of stages, declared as data.

A stage names the products it needs (of this step, or of the step before) and those it makes, and the resource it
runs on. What may overlap follows from the graph alone: in ``tppo`` mode generation does not need the critic, so the
critic update of step k runs while the window of step k + 1 is generated; in ``sync`` mode it needs it, so nothing
overlaps. Where several stages are ready for one resource, the earlier step goes first, then the earlier line here.

Colocated, servers and trainer share their devices: stages of either occupy both, the servers sleep from the end of
generation until the publish, and the publish comes after everything that the trainer has to do.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from megatron_rl.config.schema import AdvantageKind, Config, KlPlace, Mode, Placement


class Resource(Enum):
    rollout = "rollout"
    """The SGLang servers, driven from the asyncio thread."""
    trainer = "trainer"
    """The Megatron ranks; one stage at a time, on the main thread."""
    host = "host"
    """The driver's CPU: rewards and advantages."""


@dataclass(frozen=True)
class Stage:
    name: str
    resource: Resource
    makes: tuple[str, ...]
    needs: tuple[str, ...] = ()
    """Products of the same step."""
    needs_previous: tuple[str, ...] = ()
    """Products of the step before; the first step of a run finds them given."""
    does: str = ""
    shares_devices: bool = False
    """It has the devices of trainer and servers to itself."""

    @property
    def occupies(self) -> frozenset[Resource]:
        return frozenset({Resource.rollout, Resource.trainer} if self.shares_devices else {self.resource})


def graph_of(config: Config) -> tuple[Stage, ...]:
    """The stages of a step under a configuration."""
    return step_graph(
        config.schedule.mode,
        critic=config.algorithm.advantage is AdvantageKind.egae,
        reference=config.algorithm.kl.place is not KlPlace.none,
        process_rewards=bool(config.reward.process.path),
        colocated=config.rollout.placement is Placement.colocated,
    )


def step_graph(
    mode: Mode,
    *,
    critic: bool = True,
    reference: bool = False,
    process_rewards: bool = False,
    colocated: bool = False,
) -> tuple[Stage, ...]:
    """Without a critic, a reference policy or a process reward model their stages do not exist."""
    graph = _step_graph(mode, critic=critic, reference=reference, process_rewards=process_rewards)
    return _with_turns(graph) if colocated else graph


def _step_graph(mode: Mode, *, critic: bool, reference: bool, process_rewards: bool) -> tuple[Stage, ...]:
    rollout, trainer, host = Resource.rollout, Resource.trainer, Resource.host
    waits_for_critic = ("critic",) if critic and mode is Mode.sync else ()
    optional: dict[str, tuple[Stage, ...]] = {
        "reference": (
            Stage(
                "reference_logprobs", trainer, ("reference_logprobs",), ("segments",), (), "log-probs of the reference"
            ),
        )
        * reference,
        "process": (
            Stage("process_rewards", trainer, ("line_rewards",), ("scores",), (), "rewards of lines, from a model"),
        )
        * process_rewards,
        "values": (
            Stage("values", trainer, ("values",), ("segments",), ("critic",), "critic values of the window's tokens"),
        )
        * critic,
        "update_critic": (
            Stage(
                "update_critic",
                trainer,
                ("critic",),
                ("advantages",),
                (),
                "value loss on finished responses, all windows",
            ),
        )
        * critic,
    }
    advantages_need = [
        product for name in ("reference", "process", "values") for s in optional[name] for product in s.makes
    ]
    return (
        Stage(
            "generate",
            rollout,
            ("segments",),
            (),
            ("served_weights", "carried", *waits_for_critic),
            "one window of new tokens a slot",
        ),
        Stage("score", host, ("scores",), ("segments",), (), "rewards of what ended in this step"),
        Stage(
            "old_logprobs", trainer, ("old_logprobs",), ("segments",), ("policy",), "log-probs of the window's tokens"
        ),
        *optional["reference"],
        *optional["values"],
        *optional["process"],
        Stage(
            "advantages",
            host,
            ("advantages", "carried"),
            ("scores", "old_logprobs", *advantages_need),
            (),
            "advantages; finished responses leave the pool",
        ),
        Stage("update_policy", trainer, ("policy",), ("advantages",), (), "policy loss on the window's tokens"),
        Stage("publish", trainer, ("served_weights",), ("policy",), (), "new weights to every server"),
        Stage("evaluate", rollout, ("evaluation",), ("served_weights",), (), "greedy answers to held-out prompts"),
        *optional["update_critic"],
        Stage(
            "checkpoint",
            trainer,
            ("saved",),
            ("policy", "carried", *(("critic",) if critic else ())),
            (),
            "weights, optimizers, pool, sampler",
        ),
        Stage(
            "record",
            host,
            ("recorded",),
            ("saved", "served_weights", "evaluation"),
            ("recorded",),
            "metrics, display, report",
        ),
    )


def _with_turns(graph: Sequence[Stage]) -> tuple[Stage, ...]:
    """The graph for servers on the trainer's devices."""
    sleep = Stage("sleep", Resource.trainer, ("free_devices",), ("segments",), (), "servers give their memory back")
    turns = []
    for stage in graph:
        needs = stage.needs
        if stage.name == "publish":
            needs = (*needs, *(product for name in ("update_critic", "checkpoint") for product in _makes(graph, name)))
        elif stage.resource is Resource.trainer:
            needs = (*needs, *sleep.makes)
        turns.append(replace(stage, needs=needs))
        if stage.name == "generate":
            turns.append(sleep)
    return tuple(replace(stage, shares_devices=stage.resource is not Resource.host) for stage in turns)


def _makes(graph: Sequence[Stage], name: str) -> tuple[str, ...]:
    return next((stage.makes for stage in graph if stage.name == name), ())


def check_graph(graph: Sequence[Stage]) -> None:
    """ValueError when a name is doubled, a product is made twice or never, or a step waits for itself."""
    names = [stage.name for stage in graph]
    makers = [product for stage in graph for product in stage.makes]
    for kind, items in (("stage", names), ("product", makers)):
        doubled = {item for item in items if items.count(item) > 1}
        if doubled:
            raise ValueError(f"stage graph: {kind} {sorted(doubled)} is declared twice")
    for stage in graph:
        missing = (set(stage.needs) | set(stage.needs_previous)) - set(makers)
        if missing:
            raise ValueError(f"stage graph: {stage.name} needs {sorted(missing)}, which no stage makes")
    made: set[str] = set()
    waiting = list(graph)
    while waiting:
        ready = [stage for stage in waiting if made.issuperset(stage.needs)]
        if not ready:
            raise ValueError(f"stage graph: {[s.name for s in waiting]} wait for each other within one step")
        made.update(product for stage in ready for product in stage.makes)
        waiting = [stage for stage in waiting if stage not in ready]


@dataclass(frozen=True)
class StageRun:
    """One stage of one step."""

    stage: Stage
    step: int


class Frontier:
    """Which stage runs are ready. Pure bookkeeping: ``ready()`` lists, ``start()`` and ``finish()`` advance.

    At most two steps are open at a time: a step opens when the step before it has opened and its own first stage
    could run.
    """

    def __init__(self, graph: Sequence[Stage], first_step: int, last_step: int) -> None:
        check_graph(graph)
        self._graph = tuple(graph)
        self._last_step = last_step
        self._made = {(product, first_step - 1) for stage in graph for product in stage.makes}
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
        """Runs that may start now, in order of precedence, at most one for each free resource."""
        busy = {resource for run in self._running for resource in run.stage.occupies}
        found: list[StageRun] = []
        for run in self._candidates():
            if busy.isdisjoint(run.stage.occupies) and self._has_what_it_needs(run):
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
        self._made.update((product, run.step) for product in run.stage.makes)
        self._made = {(product, step) for product, step in self._made if step >= self._newest - 2}

    def stop_after(self, step: int) -> None:
        """Open no step after ``step``; an already open later step still runs to its end."""
        self._last_step = min(self._last_step, max(step, self._newest))

    def _candidates(self) -> Iterable[StageRun]:
        yield from self._open
        if self._newest < self._last_step and not any(run.step < self._newest for run in self._open):
            yield from (StageRun(stage, self._newest + 1) for stage in self._graph if not stage.needs)

    def _has_what_it_needs(self, run: StageRun) -> bool:
        here = all((product, run.step) in self._made for product in run.stage.needs)
        return here and all((product, run.step - 1) in self._made for product in run.stage.needs_previous)
