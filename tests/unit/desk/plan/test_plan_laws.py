"""Every layout that the dry run accepts can be planned, and what is called impossible is so by a count of all layouts."""

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.config.checks.model_settings import parallel_problems
from megatron_rl.config.checks.servers import placement_problems
from megatron_rl.config.layout import experts_problem, layers_problem
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import Config, Offload, ParallelConfig, Placement, Recompute
from megatron_rl.desk.costs.gpus import gpu
from megatron_rl.desk.costs.run_memory import model_folders
from megatron_rl.desk.plan.gpu_splits import anything_fits, splits
from megatron_rl.desk.plan.layout_search import cut_layers, divisors
from megatron_rl.desk.plan.memory_fit import check_fit
from megatron_rl.desk.plan.plan_search import LAYOUT_KEYS, PlanSearch
from megatron_rl.families.model_facts import as_config, dims, read_model_json, split_sizes, text_config
from megatron_rl.families.sglang_limits import split_problems

MODELS = Path(__file__).parents[4] / "tools" / "published" / "models"
NAMES = ("qwen2.5-math-7b", "qwen2.5-32b", "qwen3-4b", "qwen3-30b-a3b", "glm-4.5-air", "deepseek-v3")
H100 = gpu("H100-80G")
PLACED = "rollout.placement"
PINNABLE = (*LAYOUT_KEYS, "parallel.num_ranks", "rollout.placement", "rollout.tensor_parallel_size", "rollout.num_servers")


def accepted(config: Config, facts: SimpleNamespace, device) -> bool:
    """The dry run's checks of layouts, servers and memory."""
    parallel, sizes, num_ranks = config.parallel, dims(facts), config.parallel.num_ranks
    problems = [
        *parallel_problems(config, num_ranks),
        *placement_problems(config.rollout, num_ranks),
        layers_problem(parallel, text_config(facts).num_hidden_layers),
        experts_problem(parallel, sizes["experts"], sizes["expert_ffn"]),
        *split_problems(vars(facts), config.rollout.tensor_parallel_size, ""),
    ]
    if any(problems) or any(size % parallel.tensor_parallel_size for size in split_sizes(facts).values()):
        return False
    return not check_fit(config, {name: facts for name in model_folders(config)}, device).problem


def drawn(rng: random.Random) -> tuple[Config, SimpleNamespace, int]:
    """A model with a random number of layers, a random layout on a random cluster, and the cluster's number of GPUs."""
    name, pick = rng.choice(NAMES), rng.choice
    facts = as_config({**read_model_json(MODELS / name), "num_hidden_layers": rng.randint(4, 64)})
    machines = pick((0, 0, 1, 2, 3, 5, 6, 7, 10, 14))
    num_gpus = 8 * machines or rng.randint(2, 8)
    colocated = rng.random() < 0.5 or num_gpus < 2
    num_ranks = num_gpus if colocated else (8 * rng.randint(1, machines - 1) if machines > 1 else rng.randint(1, num_gpus - 1))
    per_server = pick(divisors(num_ranks if colocated else num_gpus - num_ranks, 8))
    stages = pick(divisors(num_ranks, facts.num_hidden_layers))
    tensor = pick(divisors(num_ranks // stages, 8))
    experts = pick(divisors(math.gcd(dims(facts)["experts"] or 1, num_ranks // stages), 256))
    parallel = ParallelConfig(
        num_ranks=num_ranks,
        tensor_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        pipeline_parallel_size=stages,
        context_parallel_size=pick(divisors(num_ranks // stages // tensor, 4)),
        pipeline_layers=cut_layers(facts.num_hidden_layers, stages),
        expert_parallel_size=experts,
        expert_tensor_parallel_size=pick((0, 1)) if experts > 1 else 0,
    )
    config = load_config(None, ["preset=tppo", f"policy.path={MODELS / name}", "policy.dtype=bfloat16"])
    number = (num_ranks if colocated else num_gpus - num_ranks) // per_server
    rollout = replace(config.rollout, tensor_parallel_size=per_server, num_servers=number)
    rollout = replace(rollout, placement=Placement.colocated if colocated else Placement.disaggregated)
    batch = replace(config.batch, max_response_tokens=pick((2048, 8192, 24576)), max_tokens_per_microbatch=pick((8192, 32768)))
    recompute = pick(list(Recompute))
    config = replace(
        config,
        parallel=parallel,
        rollout=rollout,
        batch=replace(batch, window_tokens=0, max_prompt_tokens=512),
        policy=replace(config.policy, recompute=recompute, offload=pick(list(Offload))),
        critic=replace(config.critic, recompute=recompute),
    )
    return config, facts, num_gpus


@pytest.mark.parametrize("seed", range(8))
def test_every_layout_that_the_dry_run_accepts_is_planned(seed):
    rng, tried = random.Random(seed), 0
    while tried < 6:
        config, facts, num_gpus = drawn(rng)
        # A GPU that the layout nearly fills, so that few other layouts fit.
        device = replace(H100, hbm_bytes=check_fit_bytes(config, facts) * rng.choice((1.0001, 1.02, 1.2)))
        config = with_fraction(config, facts, device)
        if not accepted(config, facts, device):
            continue
        tried += 1
        for pinned in ((), tuple(rng.sample(PINNABLE, 3)), PINNABLE):
            search = PlanSearch(config, {name: facts for name in model_folders(config)}, device, frozenset(pinned))
            found = list(itertools.islice(splits(search, num_gpus), 2))
            assert found, (facts.model_type, facts.num_hidden_layers, num_gpus, pinned, config.parallel, config.rollout)
            for trained, servers in found:
                assert all(search.allows(one, "parallel.") for one in trained)
                assert all(search.allows(one, "rollout.") for one in servers or trained)


def everything(search: PlanSearch, num_ranks: int):
    """Every layout of the policy over some ranks, with the settings that need least memory."""
    shape, sizes = search.shape, divisors(num_ranks, num_ranks)
    for tp, cp, pp, ep in itertools.product(sizes, sizes, sizes, divisors(shape.experts or 1, num_ranks)):
        if num_ranks % (tp * cp * pp) == 0 and pp <= shape.layers:
            for etp in {0, 1} if ep > 1 else {0}:
                yield ParallelConfig(
                    num_ranks=num_ranks,
                    tensor_parallel_size=tp,
                    sequence_parallel=tp > 1,
                    context_parallel_size=cp,
                    pipeline_parallel_size=pp,
                    pipeline_layers=cut_layers(shape.layers, pp),
                    expert_parallel_size=ep,
                    expert_tensor_parallel_size=etp,
                )


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_called_impossible_that_a_count_of_all_layouts_finds(name):
    facts, rng = as_config(read_model_json(MODELS / name)), random.Random(name)
    words = ["preset=tppo", f"policy.path={MODELS / name}", "policy.dtype=bfloat16", "policy.recompute=full", "critic.recompute=full"]
    config = load_config(None, [*words, "batch.max_tokens_per_microbatch=4096", "batch.max_response_tokens=4096"])
    for num_gpus in (rng.randint(1, 4), 6, 8, 24):
        rollout = replace(config.rollout, num_servers=num_gpus, placement=Placement.colocated)
        rollout = replace(rollout, server_args={"mem-fraction-static": 0.3})
        device = replace(H100, hbm_bytes=rng.uniform(20e9, 300e9))
        search = PlanSearch(replace(config, rollout=rollout), {one: facts for one in model_folders(config)}, device, frozenset({PLACED}))
        rollout = replace(rollout, tensor_parallel_size=(tp := divisors(num_gpus, 8)[-1]), num_servers=num_gpus // tp)
        layouts = (replace(config, parallel=parallel, rollout=rollout) for parallel in everything(search, num_gpus))
        found = any(accepted(one, facts, device) for one in layouts)
        assert anything_fits(replace(search, wide=True), num_gpus) >= found


def check_fit_bytes(config: Config, facts: SimpleNamespace) -> float:
    """Bytes of the fullest stage, with 2 GB of KV cache in colocated servers; those of a sequence at least."""
    bare = replace(config, rollout=replace(config.rollout, server_args={"mem-fraction-static": 1e-9}))
    return 2e9 + check_fit(bare, {name: facts for name in model_folders(config)}, H100).needed


def with_fraction(config: Config, facts: SimpleNamespace, device) -> Config:
    """The configuration with the largest mem-fraction-static, in hundredths, that fits."""
    for hundredths in range(90, 0, -1):
        rollout = replace(config.rollout, server_args={"mem-fraction-static": hundredths / 100})
        fits = replace(config, rollout=rollout)
        if hundredths == 1 or not check_fit(fits, {name: facts for name in model_folders(config)}, device).needed > device.hbm_bytes:
            return fits
    raise AssertionError
