"""What fits so many GPUs, against every setting of every layout: megatron_rl/desk/plan/plan_search.py."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config.checks.model_settings import parallel_problems
from megatron_rl.config.checks.servers import placement_problems
from megatron_rl.config.derived import shares_devices
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import Offload, Recompute
from megatron_rl.desk.costs.gpus import gpu
from megatron_rl.desk.costs.run_memory import model_folders
from megatron_rl.desk.plan import plan_search
from megatron_rl.desk.plan.gpu_splits import _servers, fewest_gpus, splits, splits_near
from megatron_rl.desk.plan.layout_search import (
    LayoutFamily,
    context_sizes,
    expert_sizes,
    layout_refusal,
    layouts,
    tensor_sizes,
)
from megatron_rl.desk.plan.memory_fit import check_fit
from megatron_rl.desk.plan.plan_search import NO_CACHE, TOO_MANY, PlanSearch, trainers
from megatron_rl.families.model_facts import as_config, read_model_json

MODELS = Path(__file__).parents[4] / "tools" / "published" / "models"


def search_of(model: str, *words: str, device: str = "H100-80G", pinned: str = "") -> PlanSearch:
    config = load_config(None, ["preset=tppo", f"policy.path={MODELS / model}", "policy.dtype=bfloat16", *words])
    facts = as_config(read_model_json(MODELS / model))
    return PlanSearch(config, {name: facts for name in model_folders(config)}, gpu(device), frozenset(pinned.split()))


def configs(search: PlanSearch, num_gpus: int):
    for trained, servers in splits(search, num_gpus):
        for trainer in trained:
            for server in servers or (trainer,):
                yield replace(trainer, rollout=server.rollout)


@pytest.mark.parametrize(("model", "num_gpus"), [("qwen2.5-math-7b", 8), ("qwen3-30b-a3b", 16), ("qwen3-4b", 5)])
def test_every_plan_fits_and_takes_all_gpus(model, num_gpus):
    search = search_of(model)
    found = list(configs(search, num_gpus))
    assert found
    for config in found:
        rollout, parallel = config.rollout, config.parallel
        assert not check_fit(config, search.facts, search.gpu).problem
        assert not list(parallel_problems(config, None)) and not list(placement_problems(rollout, parallel.num_ranks))
        serving = rollout.num_servers * rollout.tensor_parallel_size
        assert (serving if shares_devices(rollout) else serving + parallel.num_ranks) == num_gpus


def brute(search: PlanSearch, config, *, whole: bool):
    """Layout -> the least recomputation with which any setting fits, for servers of their own."""
    found = {}
    num_ranks = config.parallel.num_ranks
    pairs = [pair for pair in itertools.product(tensor_sizes(num_ranks, 8), context_sizes(num_ranks)) if math.prod(pair) <= 8]
    for stages in range(1, 17):
        for experts in expert_sizes(search.shape, num_ranks):
            for parallel in layouts(search.shape, LayoutFamily(stages, experts, whole), num_ranks, pairs):
                if layout_refusal(search.shape, parallel):
                    continue
                for recompute in Recompute:
                    one = plan_search._with_settings(search, replace(config, parallel=parallel), recompute, Offload.auto)
                    if check_fit(one, search.facts, search.gpu).needed <= search.room:
                        found[str(parallel)] = recompute
                        break
    return found


@pytest.mark.parametrize(("model", "num_ranks"), [("qwen2.5-32b", 16), ("qwen3-30b-a3b", 16)])
def test_against_all_settings_of_all_layouts(model, num_ranks):
    search = search_of(model)
    config = next(_servers(search, num_ranks, 8))
    found = [one for one in trainers(search, config) if one.parallel.virtual_pipeline_size == 1]
    chosen = {str(one.parallel): one.policy.recompute for one in found}
    whole, shared = brute(search, config, whole=True), brute(search, config, whole=False)
    assert chosen and chosen.items() <= (shared | whole).items()
    # What was left out shares more and recomputes no less than a layout of the same stages that was found.
    order, stages_of = list(Recompute), {str(one.parallel): one.parallel.pipeline_parallel_size for one in found}
    best = {stages: min(order.index(chosen[layout]) for layout in chosen if stages_of[layout] == stages) for stages in stages_of.values()}
    for layout in whole.keys() - chosen.keys():
        stages = int(layout.partition("pipeline_parallel_size=")[2].partition(",")[0])
        assert best[stages] <= order.index(whole[layout]), layout


def test_search_cache_of_fewer_ranks_does_not_change_results():
    remembering = search_of("qwen2.5-math-7b")
    for num_gpus in (8, 16):
        fresh = search_of("qwen2.5-math-7b")
        assert list(configs(remembering, num_gpus)) == list(configs(fresh, num_gpus))


def test_the_nearest_miss_is_the_nearest():
    search = search_of("qwen2.5-32b", "rollout.placement=colocated", pinned="rollout.placement")
    assert not list(splits(search, 4))
    for reason, refused in search.refused.items():
        if reason.startswith(TOO_MANY):
            found = check_fit(refused.nearest, search.facts, search.gpu)
            assert found.stage == reason.removeprefix(TOO_MANY) or refused.excess > 0
            assert found.needed - search.gpu.hbm_bytes >= refused.excess * 0.999
    assert sum(refused.number for refused in search.refused.values()) > 10


@pytest.mark.parametrize("model", ["qwen2.5-math-7b", "qwen3-30b-a3b"])
def test_the_fewest_gpus_are_the_first_that_anything_fits(model):
    fewest = fewest_gpus(search_of(model))
    assert next(iter(splits(search_of(model), fewest)), None)
    numbers = [*range(1, 9), *range(16, fewest, 8)]
    assert not any(next(iter(splits(search_of(model), number)), None) for number in numbers if number < fewest)


def server_sizes(search, num_gpus):
    return {server.rollout.tensor_parallel_size for _, servers in splits(search, num_gpus) for server in servers}


def test_a_server_is_spread_over_machines_only_where_one_is_too_small():
    assert server_sizes(search_of("deepseek-v3", device="H200"), 256) == {16}
    assert max(server_sizes(search_of("deepseek-v3", device="B300"), 256)) == 8
    assert fewest_gpus(search_of("deepseek-v3", device="B300")) * 288 >= 18 * 671  # 18 bytes a parameter


def test_search_reports_why_no_server_fits():
    search = search_of("deepseek-v3")
    search.gpu = replace(search.gpu, hbm_bytes=20e9)
    assert not list(splits(search, 256)) and fewest_gpus(search) == 0
    assert search.refused[NO_CACHE].nearest.rollout.tensor_parallel_size == 64


@pytest.mark.parametrize(
    ("words", "pinned"),
    [
        (["parallel.tensor_parallel_size=4"], "parallel.tensor_parallel_size"),
        (["rollout.placement=colocated", "policy.recompute=full"], "rollout.placement policy.recompute"),
        (["rollout.tensor_parallel_size=2", "policy.offload=always"], "rollout.tensor_parallel_size policy.offload"),
        (["batch.max_tokens_per_microbatch=40000"], "batch.max_tokens_per_microbatch"),
    ],
)
def test_search_keeps_layout_keys_set_by_the_user(words, pinned):
    search = search_of("qwen3-4b", *words, pinned=pinned)
    found = list(configs(search, 8))
    assert found and all(search.allows(config, "") for config in found)


def test_deepseek_on_256_h100_is_planned():
    found = list(configs(search_of("deepseek-v3"), 256))
    assert any((one.parallel.num_ranks, one.parallel.pipeline_parallel_size) == (224, 7) for one in found)


@pytest.mark.parametrize("machines", [5, 7, 10, 14])
def test_clusters_of_any_number_of_machines_use_layouts_of_that_number(machines):
    for share in (config.parallel.num_ranks // 8 for config in configs(search_of("qwen2.5-32b"), 8 * machines)):
        assert share in range(1, machines + 1)
    stages = {config.parallel.pipeline_parallel_size for config in configs(search_of("qwen2.5-32b"), 8 * machines)}
    assert stages & {5, 7, 10, 14}


def test_windows_ahead_are_never_colocated():
    found = list(configs(search_of("qwen3-4b", "schedule.mode=async"), 8))
    assert found and not any(shares_devices(config.rollout) for config in found)


@pytest.mark.parametrize("nodes", [8, 40, 56])
def test_of_many_nodes_the_shares_next_to_the_best_are_tried_where_both_sides_work_at_once(nodes):
    search = search_of("qwen3-4b", "schedule.mode=async")
    best = replace(search.config, parallel=replace(search.config.parallel, num_ranks=8 * nodes))
    tried = {trained[0].parallel.num_ranks // 8 for trained, _ in splits(search, 512)}
    near = {trained[0].parallel.num_ranks // 8 for trained, _ in splits_near(search, 512, best)}
    assert tried == {8, 16, 24, 32, 40, 48, 56}
    assert near == {number for number in range(max(nodes - 8, 8), min(nodes + 8, 56), 2) if number % 8}
    for trained, servers in splits_near(search, 512, best):
        for one in servers:
            assert trained[0].parallel.num_ranks + one.rollout.num_servers * one.rollout.tensor_parallel_size == 512
    assert not list(splits_near(search_of("qwen3-4b"), 512, best))
    assert not list(splits_near(search, 64, replace(best, parallel=replace(best.parallel, num_ranks=32))))
