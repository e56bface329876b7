"""Control traffic between three real processes: payloads arrive, and a timeout names the missing rank."""

from typing import Any

import pytest
import torch

from tests.integration.collectives_worker import payload_for
from tests.integration.torchrun import run_ranks


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """Observations of each rank on three layouts, and its errors."""
    folder = tmp_path_factory.mktemp("collectives")
    run_ranks(3, "tests.integration.collectives_worker", folder, log=folder / "log.txt", timeout_s=120)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(3)]


@pytest.mark.parametrize("layout", range(3))
def test_every_rank_receives_the_payload_of_its_replica(layout: int, seen: list[list[Any]]) -> None:
    for rank in range(3):
        expected = payload_for(seen[rank][layout]["topology"].dp_rank)
        for way in ("payload", "copied", "mapped", "fetched"):
            found = seen[rank][layout][way]
            assert list(found) == list(expected)
            for name, tensor in expected.items():
                assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), (way, name)


@pytest.mark.parametrize("layout", range(3))
def test_objects_reach_all_ranks_and_ragged_tensors_reach_rank_0(layout: int, seen: list[list[Any]]) -> None:
    assert [seen[rank][layout]["object"] for rank in range(3)] == [{"step": 7}] * 3
    first, second, third = seen[0][layout]["gathered"]
    assert first.tolist() == [] and second is None and third.tolist() == [2, 2]
    assert seen[1][layout]["gathered"] == seen[2][layout]["gathered"] == []


def test_a_barrier_blocks_all_ranks_until_the_last_arrives(seen: list[list[Any]]) -> None:
    assert all(layout["barrier_s"] >= 0.55 for rank in range(3) for layout in seen[rank][:3])


def test_topologies_give_ranks_their_coordinates(seen: list[list[Any]]) -> None:
    for rank in range(3):
        data, tensor, pipeline = (layout["topology"] for layout in seen[rank][:3])
        assert (data.dp_rank, data.dp_size, data.is_output_rank) == (rank, 3, True)
        assert (tensor.tp_rank, tensor.tp_size, tensor.is_output_rank) == (rank, 3, rank == 0)
        assert (pipeline.pp_rank, pipeline.pp_size, pipeline.is_output_rank) == (rank, 3, rank == 2)


def test_a_timeout_names_waiting_rank_missing_rank_call_and_seconds(seen: list[list[Any]]) -> None:
    waited_s, message = seen[1][5]
    assert 0.4 < waited_s < 20
    assert message.startswith("rank 1 waited 0.5 s for rank 0 to send experience")


def test_megatrons_globals_belong_to_the_innermost_active_layout(seen: list[list[Any]]) -> None:
    data, tensor, pipeline = (1, 1, 3), (3, 1, 1), (1, 3, 1)
    for rank in range(3):
        sizes, is_shared = seen[rank][3]
        assert sizes == [data, tensor, pipeline, data, pipeline, tensor, data] and is_shared


@pytest.mark.parametrize("rank", [0, 2])
def test_a_timeout_inside_megatrons_collectives_names_the_call_and_the_missing_rank(
    rank: int, seen: list[list[Any]]
) -> None:
    assert seen[rank][4].startswith(f"CollectiveTimeout: rank {rank} gave up ")
    assert "s into the update of the engine critic: it waited for rank 1 (which began it" in seen[rank][4]


def test_the_exit_of_a_rank_is_reported_at_once(seen: list[list[Any]]) -> None:
    assert "rank 0 lost rank 1, which should send losses" in seen[0][5]
