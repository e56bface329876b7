"""Roles of ranks in layouts of up to 1,024 ranks: our arithmetic compared with the groups that Megatron makes.

Every layout that a page, a recipe or a published row of docs/estimates.md names is tried, as one rank after the other of a
world that does not exist (``tests/fake_world.py``).
"""

import random
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.config.layout import critic_layout, layout_problems, parse_layout, ranks_needed
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import ParallelConfig
from megatron_rl.data.batch import PackedBatch, cu_seqlens_of
from megatron_rl.families.parameters import Entry
from megatron_rl.families.transforms import Replicated
from megatron_rl.models.hf.gather import owners_of
from megatron_rl.parallel.topology import ReplicaRanks, Topology, coordinates
from megatron_rl.training.batching import plan_microbatches
from megatron_rl.training.export import source_ranks
from megatron_rl.training.sequence_cache import CacheDirectory
from tests.fake_world import fake_rank

ROOT = Path(__file__).parents[2]
LAYOUT = re.compile(r"\b(?:tp|pp|ep|cp)\d+(?:\+(?:sp|layers[\d/]+|(?:tp|pp|ep|cp|dp|etp|vpp)\d+))*")
PUBLISHED = re.compile(r"\b(\d+) (?:H100|H200|H20)\b.*?\b((?:tp|pp|ep|cp)\d+(?:\+(?:sp|(?:tp|pp|ep|cp|dp|etp|vpp)\d+))*)")
LARGE = [
    ("tp8+sp+cp2+pp8+ep64+etp1", 1024),
    ("tp4+sp+pp16+ep8+etp2", 1024),
    ("tp4+sp+pp4+ep32+etp1", 128),
]
MOST_RANKS = 8
"""Worlds up to this size are checked on all ranks."""


def documented() -> list[tuple[str, int]]:
    """(layout, ranks), each on its fewest ranks and the published ones on theirs; pages show some that cannot be."""
    named = set(LARGE)
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.md")]:
        text = page.read_text()
        named |= {(match[0], 0) for match in LAYOUT.finditer(text)}
        named |= {(match[2], int(match[1])) for match in PUBLISHED.finditer(text)}
    found = set()
    for layout, num_ranks in named:
        parallel, replicas = parse_layout(layout)
        num_ranks = num_ranks or ranks_needed(parallel, replicas)
        found |= set() if list(layout_problems(parallel, num_ranks)) else {(layout, num_ranks)}
    return sorted(found)


def recipes() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("examples/*/*.yaml"))


@pytest.mark.parametrize(("layout", "num_ranks"), documented())
def test_ranks_of_a_documented_layout_have_the_right_coordinates(layout: str, num_ranks: int) -> None:
    assert_ranks_agree(parse_layout(layout)[0], num_ranks)


@pytest.mark.parametrize("recipe", recipes())
def test_ranks_of_a_recipe_have_the_right_coordinates(recipe: str) -> None:
    config = load_config([ROOT / recipe], [])
    for parallel in (config.parallel, critic_layout(config)):
        assert_ranks_agree(parallel, config.parallel.num_ranks or ranks_needed(parallel))


def test_documented_layouts_are_found() -> None:
    assert {("tp2+sp+ep2+etp1", 2), ("tp8+pp8+cp2+vpp8", 1024)} <= set(documented())
    assert max(num_ranks for _, num_ranks in documented()) == 1024


def test_two_layouts_of_one_world_take_turns() -> None:
    policy, _ = parse_layout("tp4+sp+pp4+ep32+etp1")
    critic, _ = parse_layout("tp2+sp+cp2")
    for rank in (0, 77, 127):
        with fake_rank(rank, 128, policy, critic) as topologies:
            for topology, parallel in zip(topologies, (policy, critic), strict=True):
                with topology.active():
                    assert_groups(topology, [coordinates(other, 128, parallel) for other in range(128)])
            assert parallel_state.get_tensor_model_parallel_world_size() == 4


def assert_ranks_agree(parallel: ParallelConfig, num_ranks: int) -> None:
    places = [coordinates(rank, num_ranks, parallel) for rank in range(num_ranks)]
    for rank in some_ranks(parallel, num_ranks):
        with fake_rank(rank, num_ranks, parallel) as (topology,):
            assert_groups(topology, places)
            assert_owners(topology, parallel)
            assert_batches(topology, parallel)


def some_ranks(parallel: ParallelConfig, num_ranks: int) -> list[int]:
    """All of a small world; else the first of the last stage, the last one and one in between."""
    if num_ranks <= MOST_RANKS:
        return list(range(num_ranks))
    in_stage = num_ranks // parallel.pipeline_parallel_size
    return sorted({num_ranks - in_stage, num_ranks - 1, random.Random(num_ranks).randrange(num_ranks)})


def assert_groups(topology: Topology, places: list) -> None:
    """Our coordinates are Megatron's ranks, and its groups are the ranks that differ in that coordinate alone."""
    tp, cp, dp, pp = mine = places[topology.rank]
    assert mine == (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    assert mine == (topology.tp_rank, topology.cp_rank, topology.dp_rank, topology.pp_rank)
    groups = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_data_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    for index, group in enumerate(groups):
        others = mine[:index] + mine[index + 1 :]
        expected = [rank for rank, place in enumerate(places) if place[:index] + place[index + 1 :] == others]
        assert dist.get_process_group_ranks(group) == expected
    # The first rank of each stage sends weights to the servers.
    assert source_ranks(topology)[pp] == places.index((0, 0, 0, pp))
    assert (topology.rank in source_ranks(topology)) == ((tp, cp, dp) == (0, 0, 0))


def assert_owners(topology: Topology, parallel: ParallelConfig) -> None:
    """Ranks that assemble a tensor: for each expert its first copy, otherwise the first tensor-parallel ranks."""
    ep, number = parallel.expert_parallel_size, 2 * parallel.expert_parallel_size
    held = parallel_state.get_expert_model_parallel_rank()
    first_copy = parallel_state.get_expert_data_parallel_rank() == 0
    for stage in range(topology.pp_size):
        here = stage == topology.pp_rank
        router = Entry("decoder.layers.0.mlp.router.weight", {}, Replicated())
        _, _, is_here = owners_of(router, stage, {"experts": number})
        assert is_here == (here and (topology.cp_rank, topology.dp_rank) == (0, 0))
        for expert in range(number):
            entry = Entry(f"decoder.layers.0.mlp.experts.{expert}.linear_fc1.weight", {}, Replicated())
            first, group, is_here = owners_of(entry, stage, {"experts": number})
            assert is_here == (here and first_copy and expert // (number // ep) == held)
            if is_here:
                members = dist.get_process_group_ranks(group)
                assert members == list(range(first, first + len(members)))


def assert_batches(topology: Topology, parallel: ParallelConfig) -> None:
    """Ranks that compute together get the same sequences; replicas get all of them, each once; one rank reports for each."""
    replicas = ReplicaRanks.of(parallel, topology.world_size)
    mine = replicas.of_ranks[topology.rank]
    assert mine == topology.dp_rank
    for group in (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    ):
        assert {replicas.of_ranks[rank] for rank in dist.get_process_group_ranks(group)} == {mine}
    peers = dist.get_process_group_ranks(parallel_state.get_data_parallel_group())
    assert [replicas.of_ranks[rank] for rank in peers] == list(range(len(replicas.reporters)))
    assert topology.is_output_rank == (topology.rank == replicas.reporters[mine])
    first, *others = [rank for rank, replica in enumerate(replicas.of_ranks) if replica == mine]
    # The driver's own replica receives beside it, where there is another rank.
    assert replicas.replica_roots[mine] == (others[0] if others and first == 0 else first)
    assert topology.coordinates_of(topology.rank) == (topology.tp_rank, topology.cp_rank, topology.dp_rank, topology.pp_rank)
    lengths = [3 + index % 7 for index in range(2 * len(replicas.reporters))]
    plan = plan_microbatches(lengths, len(replicas.reporters), 16)
    assert len(plan) == topology.dp_size
    batch = PackedBatch(torch.arange(sum(lengths)), cu_seqlens_of(torch.tensor(lengths)))
    payloads = CacheDirectory(topology.dp_size).payloads(batch, plan, [])
    sent = [token for payload in payloads for token in payload["tokens"].packed().tolist()]
    assert sorted(sent) == list(range(sum(lengths)))
