"""THE TABLE: the training step, one row per stage. README, docs, ``--dry-run`` and the loop share it.

What may overlap follows from the table alone (``graph.py``): in ``tppo`` mode generation does not need the critic, so
the critic update of step k runs while the window of step k + 1 is generated. In ``sync`` mode it does, so nothing
overlaps. In ``async`` mode the window of step k + 1 is generated while step k trains (``_one_window_ahead``), and weights
are published between two windows or into one (``_in_flight``).
Products are fields of the step's ``StepState``, or of the run (``OF_THE_RUN``). Without an option its
stages do not exist, and a product that is marked ``?`` is waited for only where some stage makes it.

Of the stages that may run, the first of the table goes first. The critic's comes before the policy's: it is still on the device
from its update, and the policy then comes once, for its old log-probs, its update and the publish.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.config.derived import (
    generates_ahead,
    needs_critic,
    needs_reference,
    publishes_in_flight,
    server_placement,
)
from megatron_rl.config.schema import Config, Mode
from megatron_rl.step.graph import Resource, Stage, resolve

ROLLOUT, TRAINER, HOST = Resource.rollout, Resource.trainer, Resource.host

STEP = (
    # stage                     runs on  makes                             needs                             needs of the step before
    Stage("generate",           ROLLOUT, "trajectories batch pool",        "",                               "served_weights pool"),
    Stage("sleep",              TRAINER, "free_devices",                   "batch",                          only_with="colocated"),
    Stage("score",              HOST,    "finished",                       "trajectories"),
    Stage("values",             TRAINER, "values",                         "batch",                          "critic", only_with="critic"),
    Stage("reference_logprobs", TRAINER, "reference_logprobs",             "batch",                          only_with="reference"),
    Stage("process_rewards",    TRAINER, "line_rewards",                   "finished",                       only_with="process_rewards"),
    Stage("old_logprobs",       TRAINER, "old_logprobs",                   "batch",                          "policy"),
    Stage("advantages",         HOST,    "policy_batch critic_batch",      "finished old_logprobs reference_logprobs?"
                                                                           " values? line_rewards?"),
    Stage("keep_slots",         HOST,    "kept_slots",                     "policy_batch",                   only_with="in_flight"),
    Stage("update_policy",      TRAINER, "policy",                         "policy_batch"),
    Stage("publish",            TRAINER, "served_weights",                 "policy"),
    Stage("evaluate",           ROLLOUT, "evaluation",                     "served_weights"),
    Stage("update_critic",      TRAINER, "critic",                         "critic_batch",                   only_with="critic"),
    Stage("checkpoint",         TRAINER, "saved",                          "policy pool critic? kept_slots?", "recorded"),
    Stage("record",             HOST,    "recorded",                       "saved served_weights evaluation", "recorded"),
)  # fmt: skip

OF_THE_RUN = {
    "pool": "the slots, each grown by its window: what has finished leaves, the rest goes on in the next step",
    "kept_slots": "the slots as a checkpoint of this step holds them (weights that are published into a window)",
    "policy": "the policy's updated weights",
    "critic": "the critic's updated weights",
    "served_weights": "the policy's weights on every server",
    "free_devices": "the servers have given their memory back (servers and trainer on the same devices)",
    "evaluation": "accuracy on held-out prompts, where one is due",
    "saved": "a checkpoint, where one is due",
    "recorded": "metrics, display and report",
}
"""Products that outlive a step."""

LASTING = ("policy", "critic")
"""Of these, products of which there is one: a step that has begun to make them has to end before the run can stop."""
KEEPER = "checkpoint"
"""The stage that keeps a step's state; a run that stops makes what it waits for."""
BOOKS = ("recorded",)
"""Products that a run that stops waits for no more: it leaves a long evaluation, and writes its rows at the end."""


def graph_of(config: Config) -> tuple[Stage, ...]:
    """The stages of a step under a configuration."""
    return step_graph(
        config.schedule.mode,
        critic=needs_critic(config),
        reference=needs_reference(config),
        process_rewards=bool(config.reward.process.path),
        colocated=server_placement(config.rollout).shares_devices,
        ahead=generates_ahead(config.schedule),
        in_flight=publishes_in_flight(config.schedule),
    )


def step_graph(
    mode: Mode,
    *,
    critic: bool = True,
    reference: bool = False,
    process_rewards: bool = False,
    colocated: bool = False,
    ahead: bool = True,
    in_flight: bool = False,
) -> tuple[Stage, ...]:
    """The rows of the table that exist under these options, with their needs resolved.

    ``ahead``: ``async`` mode generates one window ahead; without it (``schedule.max_staleness=0``) it is ``tppo``.
    ``in_flight``: new weights do not wait for the end of that window.
    """
    ahead = ahead and mode is Mode.async_
    options = {
        "critic": critic,
        "reference": reference,
        "process_rewards": process_rewards,
        "colocated": colocated,
        "in_flight": ahead and in_flight and not colocated,
    }
    generate, *others = STEP
    if mode is Mode.sync:
        generate = replace(generate, needs_before=f"{generate.needs_before} critic?")
    graph = resolve([generate, *others], {name for name, is_on in options.items() if is_on})
    if colocated:
        return _with_turns(graph)
    if not ahead:
        return graph
    return _in_flight(graph) if in_flight else _one_window_ahead(graph)


def stage_table_markdown() -> str:
    """The table as README and docs show it."""
    rows = [["stage", "runs on", "makes", "needs", "needs of the step before", "only with"], ["---"] * 6]
    for s in STEP:
        products = (words.replace(" ", ", ") for words in (s.makes, s.needs, s.needs_before))
        rows.append([f"`{s.name}`", s.resource.value, *products, s.only_with.replace("_", " ")])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _one_window_ahead(graph: Sequence[Stage]) -> tuple[Stage, ...]:
    """The window of step k + 1 is generated while step k trains, with the weights that step k - 1 published.

    Always with those, never sooner ones: so tokens depend on no stage's duration, and a run that goes on is the same run.
    Hence a publish waits for the next window, and has servers and trainer to itself: it meets no running request. The
    slots are kept, with that window's tokens, before the step after changes them.
    """
    changes: dict[str, dict[str, Any]] = {
        "generate": {"needs_before": "served_weights:2 pool"},
        "advantages": {"needs_before": "served_weights"},
        "publish": {"needs_before": "pool:-1", "shares_devices": True},
        "checkpoint": {"needs_before": "pool:-1 recorded"},
    }
    return tuple(replace(stage, **changes.get(stage.name, {})) for stage in graph)


def _in_flight(graph: Sequence[Stage]) -> tuple[Stage, ...]:
    """As ``_one_window_ahead``, but a publish waits for no window: the requests that it meets pause, and go on with the
    new weights. It does wait for an evaluation, whose responses are all of one version.

    A window still begins with the weights of two steps before or newer ones, so that no token is more than one update old
    when it trains. The slots are kept between two windows and before the next step's signals are noted on them.
    """
    changes: dict[str, dict[str, Any]] = {
        "generate": {"needs_before": "served_weights:2 kept_slots:2 pool"},
        "keep_slots": {"needs_before": "pool:-1"},
        "advantages": {"needs_before": "served_weights kept_slots"},
        "publish": {"needs_before": "evaluation"},
    }
    return tuple(replace(stage, **changes.get(stage.name, {})) for stage in graph)


def _with_turns(graph: Sequence[Stage]) -> tuple[Stage, ...]:
    """Colocated: servers and trainer take turns on the devices that they share.

    The servers sleep from the end of generation until the publish, and the publish comes after everything that the
    trainer has to do.
    """
    last = " ".join(stage.makes for stage in graph if stage.name in ("update_critic", "checkpoint"))
    turns = []
    for stage in graph:
        more = ""
        if stage.name == "publish":
            more = last
        elif stage.resource is TRAINER and stage.name != "sleep":
            more = "free_devices"
        shared = stage.resource is not HOST
        turns.append(replace(stage, needs=f"{stage.needs} {more}".strip(), shares_devices=shared))
    return tuple(turns)
