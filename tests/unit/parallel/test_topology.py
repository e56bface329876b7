"""Coordinates of ranks: every layout is a bijection, in Megatron's order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.layout import layers_problem, layout_problems, parse_layout, ranks_needed
from megatron_rl.config.schema import ParallelConfig
from megatron_rl.errors import ConfigError, UserError
from megatron_rl.parallel import topology
from megatron_rl.parallel.topology import coordinates

SIZES = st.integers(1, 4)


@given(tp=SIZES, cp=SIZES, dp=SIZES, pp=SIZES)
def test_ranks_and_coordinates_are_one_to_one_tensor_fastest_pipeline_slowest(
    tp: int, cp: int, dp: int, pp: int
) -> None:
    parallel = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp, context_parallel_size=cp)
    num_ranks = tp * cp * dp * pp
    found = [coordinates(rank, num_ranks, parallel) for rank in range(num_ranks)]
    assert found == [(t, c, d, p) for p in range(pp) for d in range(dp) for c in range(cp) for t in range(tp)]


@given(tp=SIZES, cp=SIZES, ep=SIZES, etp=SIZES, dp=SIZES, pp=SIZES)
def test_a_layout_fits_its_number_of_ranks_and_no_smaller_one(
    tp: int, cp: int, ep: int, etp: int, dp: int, pp: int
) -> None:
    parallel = ParallelConfig(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        context_parallel_size=cp,
        expert_parallel_size=ep,
        expert_tensor_parallel_size=etp if ep > 1 else 0,
    )
    needed = ranks_needed(parallel, dp)
    assert list(layout_problems(parallel, needed)) == []
    smaller = range(tp * cp * pp * dp, needed)
    assert all(list(layout_problems(parallel, num_ranks)) for num_ranks in smaller)


@pytest.mark.parametrize(
    ("rank", "world_size", "parallel", "message"),
    [
        (0, 6, ParallelConfig(tensor_parallel_size=4), "6 ranks .* parallel.tensor_parallel_size 4"),
        (0, 4, ParallelConfig(pipeline_parallel_size=3), "parallel.pipeline_parallel_size 3"),
        (0, 4, ParallelConfig(tensor_parallel_size=0), "parallel.tensor_parallel_size: expected at least 1"),
        (0, 6, ParallelConfig(context_parallel_size=4), "parallel.context_parallel_size 4"),
        (0, 4, ParallelConfig(expert_parallel_size=3), "parallel.expert_parallel_size 3"),
        (0, 4, ParallelConfig(tensor_parallel_size=2, expert_tensor_parallel_size=1), "expert_tensor_parallel_size"),
        (0, 4, ParallelConfig(virtual_pipeline_size=2), "parallel.pipeline_parallel_size is 1"),
        (0, 4, ParallelConfig(pipeline_parallel_size=2, pipeline_layers=[4]), "1 x|x parallel.virtual_pipeline_size"),
        (0, 4, ParallelConfig(pipeline_parallel_size=2, pipeline_layers=[4, 0]), "parallel.pipeline_layers.*at least"),
        (0, 4, ParallelConfig(sequence_parallel=True), "parallel.tensor_parallel_size is 1"),
        (4, 4, ParallelConfig(), "rank is in"),
    ],
)
def test_an_impossible_layout_is_refused_by_its_key(
    rank: int, world_size: int, parallel: ParallelConfig, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        coordinates(rank, world_size, parallel)


def test_short_names_list_every_size() -> None:
    found, dp = parse_layout("tp2+sp+cp3+pp2+vpp2+ep4+etp1+layers1/2/3/4+dp5")
    assert dp == 5
    assert found == ParallelConfig(
        tensor_parallel_size=2,
        sequence_parallel=True,
        context_parallel_size=3,
        pipeline_parallel_size=2,
        virtual_pipeline_size=2,
        expert_parallel_size=4,
        expert_tensor_parallel_size=1,
        pipeline_layers=[1, 2, 3, 4],
    )


@pytest.mark.parametrize("text", ["tp2pp2", "tp2·pp2", "tp2*pp2", " tp2+pp2"])
def test_sizes_may_be_joined_in_other_ways(text: str) -> None:
    assert parse_layout(text) == parse_layout("tp2+pp2")


@pytest.mark.parametrize("text", ["", "tp", "2tp", "xp2", "tp2+", "tp2++pp2", "layers", "tp2,pp2", "dp0"])
def test_an_invalid_short_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="layout"):
        parse_layout(text)


def test_layers_are_split_evenly_or_as_configured() -> None:
    assert layers_problem(ParallelConfig(pipeline_parallel_size=2), 6) is None
    assert "does not divide" in layers_problem(ParallelConfig(pipeline_parallel_size=2, virtual_pipeline_size=2), 6)
    uneven = ParallelConfig(pipeline_parallel_size=2, pipeline_layers=[2, 4])
    assert layers_problem(uneven, 6) is None
    assert "sum 6" in layers_problem(uneven, 7)


def test_ranks_that_nccl_does_not_connect_fail_at_the_start_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: torch.Tensor) -> None:
        raise RuntimeError("NCCL error in: NCCLUtils.cpp:94, invalid usage\nLast error:\nDuplicate GPU detected : rank 1 and rank 0")

    monkeypatch.setattr(topology.dist, "all_reduce", refuse)
    with pytest.raises(UserError, match="Duplicate GPU detected : rank 1 and rank 0. NCCL_DEBUG=INFO"):
        topology._init_nccl_world(torch.device("cpu"))
