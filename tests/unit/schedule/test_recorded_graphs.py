"""The graph of every mode, with every set of models, equals the recorded one, stage for stage."""

import json
from pathlib import Path

import pytest

from megatron_rl.config.schedule_facts import Facts, Overlap
from megatron_rl.schedule.graph import Resource, Stage
from megatron_rl.schedule.table import make_graph
from tests.unit.schedule.old_stages import only_with

RECORDED = json.loads((Path(__file__).parent / "recorded_graphs.json").read_text())


@pytest.mark.parametrize("options", RECORDED)
def test_a_graph_equals_the_recorded_one(options):
    overlap, *models = options.split()
    models = {name: name in models for name in ("colocated", "critic", "reference", "process_rewards")}
    recorded = tuple(Stage(name, Resource(resource), *columns) for name, resource, *columns in RECORDED[options])
    assert only_with({stage.name for stage in recorded}, make_graph(Facts(Overlap[overlap], **models))) == recorded
