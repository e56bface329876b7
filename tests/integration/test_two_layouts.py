"""A policy and a critic of different layouts on the same ranks compute what they compute on one rank."""

import pytest
import torch

from tests.integration.torchrun import run_ranks
from tests.integration.two_layouts_worker import CASES
from tests.tiny_models import make_tiny_model

RELATIVE = 1e-5


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Number of ranks -> what its launch saw."""
    folder = tmp_path_factory.mktemp("two_layouts")
    make_tiny_model(folder / "dense", "qwen3", num_hidden_layers=4)
    make_tiny_model(folder / "experts", "qwen3_moe", num_hidden_layers=4)
    found = {}
    for num_ranks in (1, 4):
        out = folder / f"ranks{num_ranks}"
        out.mkdir()
        module = "tests.integration.two_layouts_worker"
        run_ranks(num_ranks, module, folder, out, log=folder / f"log{num_ranks}.txt", timeout_s=300)
        found[num_ranks] = torch.load(out / "results.pt", weights_only=False)
    return found


PARTS = [(name, part) for name, case in CASES.items() for part in ["begun"] + ["resumed"] * (case.then is not None)]


@pytest.mark.parametrize(("case", "part"), PARTS)
def test_a_step_of_both_models_is_that_of_one_rank_also_after_going_on_in_other_layouts(results, case, part):
    found, expected = results[4][case][part], results[1][case][part]
    for name in ("values", "final values", "logprobs"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=5e-6, msg=name)
    for engine in ("policy", "critic"):
        grad_norm, metrics = found[engine]
        assert grad_norm == pytest.approx(expected[engine][0], rel=RELATIVE)
        for name, (total, denominator) in expected[engine][1].items():
            assert metrics[name] == pytest.approx((total, denominator), rel=RELATIVE, abs=RELATIVE), name
        weights, expected_weights = found[f"weights of {engine}"], expected[f"weights of {engine}"]
        assert weights.keys() == expected_weights.keys()
        for name, weight in expected_weights.items():
            difference = (weights[name] - weight).abs().max().item()
            assert difference <= RELATIVE * weight.abs().max().item(), f"{engine}: {name} differs by {difference}"


def test_the_second_step_starts_from_the_first_ones_weights(results):
    """Otherwise going on from the files could not be told from starting again."""
    begun, resumed = results[1]["experts"]["begun"], results[1]["experts"]["resumed"]
    assert (begun["logprobs"] - resumed["logprobs"]).abs().max() > 1e-3
    assert (begun["values"] - resumed["values"]).abs().max() > 1e-3
