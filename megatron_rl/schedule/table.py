"""THE TABLE: the stages of a training step, one row each, with everything that a mode changes. Pure and quick to import.

The loop runs the table, the simulator puts it on a clock, and planner, console, report and docs read it; ``row_of`` raises for a
stage that it lacks. A row's function is ``run`` in the file of its name in ``step/stages/``.

Needs of other steps have four columns, one per ``Overlap``: ``before``, and three columns ``before_...`` of which an empty cell means
the cell of ``before``. ``needs_colocated`` adds needs of the same step if servers and trainer share devices. ``x?`` counts only if
some stage makes x.

Among the stages that may run, the first row goes first. The critic's rows precede the policy's, because the critic is still on the
device from its update. The policy is then reloaded once, for its old log-probs, its update and the publish.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import assert_never

from megatron_rl.config.schedule_facts import Facts, Overlap
from megatron_rl.errors import DataError
from megatron_rl.schedule.graph import Resource, Stage, check_graph

ROLLOUT, TRAINER, HOST = Resource.rollout, Resource.trainer, Resource.host


class Cost(Enum):
    """The quantity that a stage's seconds follow; the simulator predicts and calibrates with it."""

    generation = "the servers' decode and prefill"
    batch = "the tokens of the step's batch"
    old_logprobs = "the same tokens, without those of a first update that gives its own log-probs"
    finished = "the responses that ended"
    policy_updates = "the tokens of the batch, and the policy's optimizer steps"
    critic_updates = "the tokens of finished responses, and the critic's optimizer steps"
    publish = "fixed; nothing while the policy rests"
    evaluations = "the steps in which an evaluation is due"
    checkpoints = "the steps in which a checkpoint is due"
    fixed = "fixed"


class DeviceWork(Enum):
    """The work of a model on the trainer's devices."""

    none = "none"
    forward = "forward"
    update = "update"
    send = "send"


@dataclass(frozen=True)
class StageRow:
    """A stage in all modes; a column with several products separates them by spaces.

    ``x:n`` is the x of n steps before (-n: after); N is ``Facts.ahead``.
    """

    name: str
    resource: Resource
    makes: str
    needs: str = ""
    before: str = ""
    """Needs of other steps if only the critic's update overlaps (mode tppo); the default of the next three columns."""
    before_in_sync: str = ""
    before_ahead: str = ""
    before_in_flight: str = ""
    needs_colocated: str = ""
    alone_ahead: bool = False
    """With windows ahead the stage has servers and trainer to itself."""
    only_with: str = ""
    """The fact, a name of ``Facts``, without which the stage does not exist."""
    cost: Cost = Cost.fixed
    model: str = ""
    """The model on the trainer's devices: policy, critic, reference or process."""
    work: DeviceWork = DeviceWork.none
    """The work of that model, from which the planner computes memory."""
    servers_awake: bool = False
    """Colocated servers have their weights and caches on the devices."""
    color: str = "grey"
    """The color in charts (``desk/report/charts``)."""
    style: str = "bright_black"
    """The rich style in the terminal."""

    def before_of(self, overlap: Overlap) -> str:
        match overlap:
            case Overlap.nothing:
                return self.before_in_sync or self.before
            case Overlap.critic:
                return self.before
            case Overlap.training:
                return self.before_ahead or self.before
            case Overlap.publish:
                return self.before_in_flight or self.before
            case _:
                assert_never(overlap)

    def exists(self, facts: Facts) -> bool:
        return not self.only_with or bool(getattr(facts, self.only_with))

    def stage(self, facts: Facts, made: Collection[str]) -> Stage:
        """The row as it runs under ``facts``.

        ``made``: products of all rows that exist under ``facts``; a need ``x?`` of any other product is dropped.
        """

        def existing(words: str) -> str:
            return " ".join(w.removesuffix("?") for w in words.split() if not w.endswith("?") or w[:-1] in made)

        is_alone = self.resource is not HOST if facts.colocated else self.alone_ahead and facts.overlap is Overlap.training
        needs = f"{self.needs} {self.needs_colocated}" if facts.colocated else self.needs
        before = existing(self.before_of(facts.overlap))
        before = before.replace(":-N", f":{-facts.ahead}").replace(":N+1", f":{facts.ahead + 1}")
        return Stage(self.name, self.resource, self.makes, existing(needs), before, self.only_with, is_alone)


FORWARD, UPDATE, SEND = DeviceWork.forward, DeviceWork.update, DeviceWork.send

ROWS = (
    StageRow("generate", ROLLOUT, "trajectories batch pool", before="served_weights pool",
        before_in_sync="served_weights pool critic?", before_ahead="served_weights:N+1 pool",
        before_in_flight="served_weights:N+1 kept_slots:N+1 pool",
        cost=Cost.generation, servers_awake=True, color="blue", style="blue"),
    StageRow("sleep", TRAINER, "free_devices", "batch", only_with="colocated", color="indigo", style="slate_blue3"),
    StageRow("score", HOST, "finished", "trajectories", cost=Cost.finished),
    StageRow("values", TRAINER, "values", "batch", before="critic", needs_colocated="free_devices", only_with="critic",
        cost=Cost.batch, model="critic", work=FORWARD, color="violet", style="magenta"),
    StageRow("reference_logprobs", TRAINER, "reference_logprobs", "batch", needs_colocated="free_devices", only_with="reference",
        cost=Cost.batch, model="reference", work=FORWARD, color="brown", style="bright_cyan"),
    StageRow("process_rewards", TRAINER, "line_rewards", "finished", needs_colocated="free_devices", only_with="process_rewards",
        cost=Cost.batch, model="process", work=FORWARD, color="olive", style="bright_yellow"),
    StageRow("old_logprobs", TRAINER, "old_logprobs", "batch", before="policy", needs_colocated="free_devices",
        cost=Cost.old_logprobs, model="policy", work=FORWARD, color="teal", style="cyan"),
    StageRow("advantages", HOST, "policy_batch critic_batch", "finished old_logprobs reference_logprobs? values? line_rewards?",
        before_ahead="served_weights", before_in_flight="served_weights kept_slots", cost=Cost.batch, color="yellow"),
    StageRow("keep_slots", HOST, "kept_slots", "policy_batch", before_in_flight="pool:-N", only_with="in_flight",
        color="sand", style="wheat4"),
    StageRow("updated_values", TRAINER, "updated_values", "policy_batch critic", needs_colocated="free_devices", only_with="critic_first",
        cost=Cost.batch, model="critic", work=FORWARD, color="purple", style="medium_purple"),
    StageRow("update_policy", TRAINER, "policy", "policy_batch updated_values?", needs_colocated="free_devices",
        cost=Cost.policy_updates, model="policy", work=UPDATE, color="green", style="green"),
    StageRow("publish", TRAINER, "served_weights", "policy", before_ahead="pool:-N", before_in_flight="evaluation",
        needs_colocated="critic? saved", alone_ahead=True,
        cost=Cost.publish, model="policy", work=SEND, servers_awake=True, color="orange", style="yellow"),
    StageRow("evaluate", ROLLOUT, "evaluation", "served_weights", cost=Cost.evaluations, color="sky", style="bright_blue"),
    StageRow("update_critic", TRAINER, "critic", "critic_batch", needs_colocated="free_devices", only_with="critic",
        cost=Cost.critic_updates, model="critic", work=UPDATE, color="pink", style="bright_magenta"),
    StageRow("checkpoint", TRAINER, "saved", "policy pool critic? kept_slots?", before="recorded", before_ahead="pool:-N recorded",
        needs_colocated="free_devices", cost=Cost.checkpoints, color="red"),
    StageRow("record", HOST, "recorded", "saved served_weights evaluation", before="recorded", color="slate", style="grey50"),
)  # fmt: skip
# Reasons for the cells in the columns for windows ahead:
# - generate: always the weights of N + 1 steps before (N: schedule.max_staleness), never newer ones, so tokens depend on no stage's
#   duration and a resumed run is the same run. In flight they may be newer, and no token is more than N updates old when it trains.
# - publish: waits for the last window ahead, so it meets no running request; in flight those requests pause instead, and it waits for an
#   evaluation, whose responses are all of one version. Colocated servers sleep until then, so the trainer's work comes first.
# - checkpoint, keep_slots: the slots are kept with the tokens of all windows ahead, before the step after these changes them.
# - generate in sync: full responses wait for the critic too, so that nothing overlaps.
_ROW_OF = {row.name: row for row in ROWS}

RUN_PRODUCTS = {
    "pool": "the slots, each grown by its window: finished responses leave, the others continue in the next step",
    "kept_slots": "the slots as a checkpoint of this step stores them (weights that are published into a window)",
    "policy": "the policy's updated weights",
    "critic": "the critic's updated weights",
    "served_weights": "the policy's weights on every server",
    "free_devices": "the servers have given their memory back (servers and trainer on the same devices)",
    "evaluation": "accuracy on held-out prompts, in a step in which an evaluation is due",
    "saved": "a checkpoint, in a step in which one is due",
    "recorded": "metrics, display and report",
}
"""Products that outlive a step; the others are fields of its ``StepState``."""

LASTING = ("policy", "critic")
"""Products that exist once per run: a step that has started to make them must end before the run can stop."""
GENERATE, OLD_LOGPROBS, UPDATE_POLICY, PUBLISH, UPDATE_CRITIC = "generate", "old_logprobs", "update_policy", "publish", "update_critic"
"""Stages that readers of the table mean by name; for everything else they read columns."""
KEEPER = "checkpoint"
"""The stage that stores a step's state; a stopping run still makes every product that this stage waits for."""
LAST = "record"
"""The last stage of a step; after it only the part of the step that a checkpoint needs is kept."""
OUTPUT_ONLY = ("recorded",)
"""Products that a stopping run does not wait for, so that it does not wait for a long evaluation; it writes its records at the end."""


def row_of(stage: str) -> StageRow:
    """Return the row of a stage. Raises DataError for an unknown name, which a file of another version may contain."""
    if stage not in _ROW_OF:
        raise DataError(f"no stage is called {stage!r}; the table (schedule/table.py) has {', '.join(_ROW_OF)}")
    return _ROW_OF[stage]


def in_table_order(stages: Collection[str]) -> list[str]:
    """Return the given stages in the order of the rows. Raises DataError for an unknown name."""
    return sorted(stages, key=lambda stage: ROWS.index(row_of(stage)))


@cache
def make_graph(facts: Facts) -> tuple[Stage, ...]:
    """Return the stages of a step under ``facts``, with resolved needs. Raises ValueError for contradictory facts."""
    if facts.colocated and facts.ahead:
        raise ValueError(f"facts: overlap={facts.overlap.name} needs devices that servers and trainer do not share")
    rows = [row for row in ROWS if row.exists(facts)]
    made = {product for row in rows for product in row.makes.split()}
    graph = tuple(row.stage(facts, made) for row in rows)
    check_graph(graph, goals=(KEEPER, LAST))
    return graph


def table_markdown(facts: Facts | None = None) -> str:
    """Return the table as Markdown: all columns that determine a graph or, with ``facts``, the stages that run in one mode."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (_table_cells() if facts is None else _graph_cells(make_graph(facts))))


def _table_cells() -> list[list[str]]:
    head = ["stage", "runs on", "makes", "needs", "needs of earlier steps"]
    head += ["in sync", "a window ahead", "in flight", "colocated", "only with"]
    cells = [head, ["---"] * len(head)]
    for row in ROWS:
        columns = (row.makes, row.needs, row.before, row.before_in_sync, row.before_ahead, row.before_in_flight, row.needs_colocated)
        made, *needs = (words.replace(" ", ", ") for words in columns)
        needs[3] += " (alone)" if row.alone_ahead else ""
        cells.append([f"`{row.name}`", row.resource.value, made, *needs, row.only_with.replace("_", " ")])
    return cells


def _graph_cells(graph: Sequence[Stage]) -> list[list[str]]:
    cells = [["stage", "occupies", "makes", "needs", "needs of other steps"], ["---"] * 5]
    for stage in graph:
        occupies = " ".join(sorted(resource.value for resource in stage.occupies))
        cells.append([f"`{stage.name}`", occupies, *(w.replace(" ", ", ") for w in (stage.makes, stage.needs, stage.needs_before))])
    return cells
