"""The tiny models of ``tools/learn_families.py`` are ones that both engines compute alike on a CPU."""

import json
import sys
from pathlib import Path

import pytest

from megatron_rl.families.model_facts import read_model_json
from megatron_rl.families.sglang_limits import cpu_problems, engine_problems
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.system.megatron_core import linear_attention_problem

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))
from learn_families import FIELDS, model_fields


@pytest.mark.parametrize("family", FIELDS)
def test_models_are_trained_and_served_on_a_cpu(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model_fields(family, 40)))
    model = read_model_json(tmp_path)
    assert [*engine_problems(model, "."), *cpu_problems(model, ".")] == []
    if "linear_num_key_heads" not in model or not linear_attention_problem():
        load_hf_config(tmp_path)
