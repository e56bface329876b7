"""The ranking against the simulation of every plan: megatron_rl/desk/plan/plan_ranking.py."""

from dataclasses import replace

import pytest

from megatron_rl.desk.plan import plan_ranking
from megatron_rl.desk.plan.gpu_splits import splits
from megatron_rl.desk.plan.plan_ranking import PlanRanking, with_window
from megatron_rl.desk.simulate.estimated_costs import estimated_timing
from megatron_rl.desk.simulate.lengths import named_lengths
from megatron_rl.desk.simulate.prediction import Workload, compute_means, predict
from tests.unit.desk.plan.test_plan_search import search_of

WORKLOAD = Workload(named_lengths("lognormal:median=1000,sigma=1,max=8192"), named_lengths("fixed:length=100"))
NUM_GPUS = 4
SMALL = ("batch.max_response_tokens=8192", "batch.window_tokens=4096", "batch.num_prompts_per_step=32")


def ranked(search, windows, number=8):
    return PlanRanking(search.config, search.facts["policy"], search.gpu, WORKLOAD, windows).best(splits(search, NUM_GPUS), number)


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(plan_ranking, "_RESPONSES_THAT_COUNT", 6_000)


@pytest.mark.parametrize("mode", ["tppo", "sync", "async"])
def test_the_first_is_as_fast_as_any_of_all_that_fit(mode):
    words = [*SMALL, f"schedule.mode={mode}", *(["batch.window_tokens=0"] if mode == "sync" else [])]
    windows = [0] if mode == "sync" else [2048, 4096]
    search = search_of("qwen3-4b", *words)
    best = ranked(search, windows)
    one = PlanRanking(search.config, search.facts["policy"], search.gpu, WORKLOAD, windows)
    works = {}
    everything = [
        one._simulated(with_window(replace(trainer, rollout=server.rollout), window), works).response_s
        for trainers, separate in splits(search_of("qwen3-4b", *words), NUM_GPUS)
        for trainer in trainers
        for server in separate or (trainer,)
        for window in windows
    ]
    assert best[0].response_s <= min(everything) * (1 + 3 * plan_ranking._SAME)
    assert [found.response_s for found in best] == pytest.approx(sorted(found.response_s for found in best), rel=2 * plan_ranking._SAME)


def test_a_plan_takes_what_simulate_says_of_it():
    search = search_of("qwen3-4b", *SMALL)
    found = ranked(search, [4096], 2)[0]
    scenario = PlanRanking(search.config, search.facts["policy"], search.gpu, WORKLOAD, [4096])._limited(found.config)
    timing = estimated_timing(found.config, search.gpu)
    alone = compute_means(predict(scenario, WORKLOAD, timing, num_steps=60, seed=3))
    assert found.response_s == pytest.approx(1 / alone.finished_per_s, rel=0.05)


def test_reported_bottleneck_is_the_busiest_resource():
    search = search_of("qwen3-4b", *SMALL)
    for found in ranked(search, [4096]):
        apart = found.config.rollout.placement.value == "disaggregated"
        if apart:
            assert found.bottleneck.startswith("trainer" if found.outcome.trainer_idle <= found.outcome.rollout_idle else "servers")
        else:
            assert found.bottleneck.startswith(("generation", "training"))
