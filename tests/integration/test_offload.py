"""Models that wait in host memory: what leaves the device when, and that nothing else differs.

One launch of offload_worker.py on 2 ranks: policy, critic and reference take two steps, with offload and without; with it,
the second once more from the files. On 4 ranks tests/integration/two_layouts.py offloads.
"""

import pytest
import torch

from tests.integration.offload_worker import CASES
from tests.integration.torchrun import run_ranks
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offload")
    make_tiny_model(folder / "models" / "qwen2", "qwen2")
    make_tiny_model(folder / "models" / "tied", "qwen3", tie_word_embeddings=True)
    make_tiny_model(folder / "models" / "experts", "qwen3_moe", num_hidden_layers=2)

    worker, log = "tests.integration.offload_worker", folder / "log.txt"
    run_ranks(2, worker, folder / "models", folder, log=log, timeout_s=300)
    return torch.load(folder / "results.pt", weights_only=False)


def assert_equal(found, expected, name=""):
    """Bit by bit, through dictionaries."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(found[key], expected[key], f"{name} {key}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), name
    else:
        assert found == expected, name


@pytest.mark.parametrize("case", CASES)
def test_offload_changes_no_bit(results, case):
    moved, stayed = (results[case][offload] for offload in ("always", "never"))
    for part in ("first", "second"):
        assert_equal(moved[part], stayed[part], part)


@pytest.mark.parametrize("case", CASES)
def test_an_offloaded_model_resumes_from_its_checkpoint_bit_for_bit(results, case):
    found = results[case]["always"]
    assert_equal(found["resumed"], found["second"])
    assert not torch.equal(found["second"]["logprobs"], found["first"]["logprobs"])


def held(results, case, offload):
    """(what goes on, engine -> component -> bytes) of every rank, in order."""
    return [moment for watch in results[case][offload]["held"] for moment in watch]


@pytest.mark.parametrize("case", CASES)
def test_only_the_active_model_occupies_device_memory(results, case):
    moments = held(results, case, "always")
    for what, engines in moments:
        working = what.split()[0]
        for name, components in engines.items():
            # On one base, policy and reference keep their weights while the critic works.
            kept = {"weights"} if case == "adapters" and working in engines and name != "critic" else set()
            if name != working:
                assert {size for component, size in components.items() if component not in kept} == {0}, (what, name)
    trained = [engines[what.split()[0]] for what, engines in moments if what.endswith("trains")]
    assert trained and all(min(components.values()) > 0 for components in trained)
    assert {what for what, _ in moments} == {
        *("all are built", "servers generate", "policy trains", "critic trains"),
        *("policy answers", "critic answers", "reference answers"),
    }


@pytest.mark.parametrize("case", CASES)
def test_without_offload_gradients_exist_during_an_update_only(results, case):
    for what, engines in held(results, case, "never"):
        for name, components in engines.items():
            assert components["weights"] > 0
            assert (components["gradients"] > 0) == (what == f"{name} trains"), what
