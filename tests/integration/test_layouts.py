"""Invariance: every layout computes the same update. ``doctor`` runs the launches (1, 2 and 4 ranks) and judges them."""

from pathlib import Path

import pytest

from megatron_rl.cli import main
from megatron_rl.desk.doctor.layout_comparison import check_invariance
from megatron_rl.errors import UserError
from tests.integration.preloaded import preloading
from tests.tiny_models import make_tiny_model

DENSE = ["tp2", "cp2", "pp2+vpp2", "pp2+layers1/3"]
ON_TWO_RANKS = ["dp2", "ep2", "tp2", "tp2+sp+ep2+etp1", "pp2+vpp2+layers1/1/1/1", "cp2+ep2"]
ON_FOUR_RANKS = ["tp2+sp+dp2", "tp2+sp+ep2", "tp2+sp+cp2", "pp2+cp2+ep2", "pp2+vpp2+ep2", "ep4"]
REFUSED = ["ep3"]
ADDED = {"tp2": "tp2+sp"}
"""Experts cannot do without."""
EXPERTS = [*ON_TWO_RANKS, *REFUSED, *ON_FOUR_RANKS]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_tiny_model(folder / "dense", "qwen3", num_hidden_layers=4, tie_word_embeddings=True)
    make_tiny_model(folder / "experts", "qwen3_moe", num_hidden_layers=4)
    return folder


@pytest.mark.parametrize(("model", "role", "layouts"), [("dense", "critic", DENSE), ("experts", "policy", EXPERTS)])
def test_one_update_is_the_same_in_every_layout(models, model, role, layouts):
    with preloading():
        findings = check_invariance(str(models / model), layouts, role=role)
    shown = [ADDED.get(layout, layout) if model == "experts" else layout for layout in layouts]
    assert [finding.layout for finding in findings] == ["tp1", *shown]
    expected = ["refused" if layout in REFUSED and model == "experts" else "same" for layout in layouts]
    assert [finding.verdict for finding in findings[1:]] == expected, findings
    explained = [finding.layout for finding in findings if finding.reason]
    assert explained == [layout for layout in shown if model == "experts" and layout in ("ep3", "tp2+sp")]


def test_impossible_layouts_are_refused_with_the_reason(models, capsys):
    layouts = "ep2,pp3,tp8,vpp2,tp2+etp1"
    assert main(["doctor", "--invariance", "--model", str(models / "dense"), "--layouts", layouts]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for reason in (
        "no experts to share over parallel.expert_parallel_size 2",
        "num_hidden_layers 4 does not divide by parallel.pipeline_parallel_size 3",
        "num_key_value_heads 2 does not divide by parallel.tensor_parallel_size 8",
        "parallel.pipeline_parallel_size is 1",
        "parallel.expert_tensor_parallel_size: without expert parallelism",
    ):
        assert reason in shown


def test_a_reference_that_cannot_run_is_an_error(models):
    with pytest.raises(UserError, match="reference layout tp8 cannot run"):
        check_invariance(str(models / "dense"), ["tp1"], reference="tp8")
