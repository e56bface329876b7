"""Weights from every pipeline stage to servers with tensor parallelism, over groups and through shared memory.

One launch of stage_sync_worker.py (4 ranks, 2 servers of 2 workers each) goes through the scenario.
"""

import json
from typing import Any

import pytest

from tests.integration.torchrun import run_ranks
from tests.tiny_models import make_tiny_model

LAUNCH_TIMEOUT_S = 400
MAX_LOGPROB_ERROR = 1e-4

pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("stage_sync")
    model = make_tiny_model(folder / "model", "qwen3_moe", vocab_size=80)
    run_ranks(
        4, "tests.integration.stage_sync_worker", model, folder, log=folder / "log.txt", timeout_s=LAUNCH_TIMEOUT_S
    )
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize(
    "publish",
    [
        "first publish",
        "second publish, same groups",
        "colocated",
        "colocated, after the failure",
        "after the failures",
    ],
)
def test_every_server_gives_the_trainers_logprobs_under_the_published_version(results, publish):
    found = results[publish]
    assert len(found["seen"]) == (1 if publish == "after the failures" else 2)
    for error, version in found["seen"]:
        assert error < MAX_LOGPROB_ERROR
        assert version == found["version"]


def test_the_weights_differed_before(results):
    assert min(error for error, _ in results["without a publish"]["seen"]) > 100 * MAX_LOGPROB_ERROR


def test_a_stage_whose_stream_fails_is_named_by_its_rank(results):
    assert "rank 2: the trainer's stream of tensors failed" in results["failing rank"]
    assert "OSError: a broken rank" in results["failing rank"]


def test_a_server_killed_between_the_stages_buckets_is_named(results):
    assert f"{results['killed']} is unreachable or exited" in results["killed server"]


def test_a_colocated_publish_without_a_tensor_keeps_the_version(results):
    assert "missing: absent" in results["colocated, missing tensor"]
