"""The table, the files of its stages and the run's components agree; a new stage that gets this wrong fails here or at construction."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import get_type_hints

import pytest

from megatron_rl.config.schedule_facts import Facts
from megatron_rl.desk.doctor.step_replay import STAGES
from megatron_rl.schedule import table
from megatron_rl.schedule.table import HOST, ROWS, RUN_PRODUCTS, StageRow, make_graph, row_of
from megatron_rl.step import stages
from megatron_rl.step.loop import LoopComponents, TrainingLoop
from megatron_rl.step.state import StepState


def test_each_row_has_a_file_and_each_file_a_row():
    files = {path.stem for path in Path(stages.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == {row.name for row in ROWS}


@pytest.mark.parametrize("name", [row.name for row in ROWS])
def test_a_stage_takes_components_by_their_names_and_types(name):
    run, taken = stages.function_of(name)
    wanted, components = get_type_hints(run), get_type_hints(LoopComponents)
    assert {one: wanted[one] for one in taken} == {one: components[one] for one in taken}
    assert list(run.__annotations__)[:2] == ["step", "state"] and wanted["state"] is StepState


def test_every_product_is_a_field_of_the_steps_state_or_outlives_the_step():
    products = {product for row in ROWS for product in row.makes.split()}
    assert products <= set(StepState.__dataclass_fields__) | set(RUN_PRODUCTS)


def test_replayed_stages_are_rows():
    assert all(row_of(name) for name in STAGES)


@pytest.fixture
def components():
    """Stand-ins under the names of all components; the stages' functions are found afresh before and after."""
    stages.function_of.cache_clear()
    yield SimpleNamespace(**dict.fromkeys(LoopComponents.__dataclass_fields__, "a stand-in"))
    stages.function_of.cache_clear()


def test_a_newcomers_stage_is_a_file_and_a_row(monkeypatch, components):
    """``rerank`` exists nowhere: with one file, one row and a need of its product it runs in the loop, and readers know it."""
    seen = []

    async def generate(step, state):
        seen.append(state)

    def rerank(step, state, *, recorder):
        seen.append((step, state, recorder))

    module = ModuleType("megatron_rl.step.stages.rerank")
    module.run = rerank
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("megatron_rl.step.stages.generate.run", generate)
    rows = [replace(row, needs=f"{row.needs} order") if row.name == "advantages" else row for row in ROWS]
    rows.insert(3, StageRow("rerank", HOST, "order", "finished", color="brown", style="red"))
    monkeypatch.setattr(table, "ROWS", tuple(rows))
    monkeypatch.setattr(table, "_ROW_OF", {row.name: row for row in rows})

    graph = make_graph.__wrapped__(Facts())
    actions = TrainingLoop(components).actions(graph)
    asyncio.run(actions["generate"](4))
    actions["rerank"](4)
    assert seen[1] == (4, seen[0], "a stand-in") and isinstance(seen[0], StepState)
    (stage,) = (one for one in graph if one.name == "rerank")
    assert stage.waits_for == (("finished", 0),) and row_of("rerank").color == "brown" and "`rerank`" in table.table_markdown()


def test_a_stage_that_takes_an_unknown_component_fails_when_the_loop_is_made(monkeypatch, components):
    monkeypatch.setattr("megatron_rl.step.stages.score.run", lambda step, state, *, oracle: None)
    with pytest.raises(AttributeError, match="oracle"):
        TrainingLoop(components).actions(make_graph(Facts()))
