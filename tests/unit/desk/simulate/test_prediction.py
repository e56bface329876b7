"""Means of a prediction: megatron_rl/desk/simulate/prediction.py."""

from dataclasses import replace

import pytest

from megatron_rl.desk.simulate.lengths import named_lengths
from megatron_rl.desk.simulate.prediction import Workload, compute_means, predict
from megatron_rl.desk.simulate.recorded_run import read_run
from megatron_rl.desk.simulate.scenario import make_scenario
from megatron_rl.desk.simulate.simulation_request import observed
from tests.unit.desk.simulate.made_runs import LENGTHS, TIMING, make_config, make_run

SLOW_SERVERS = replace(TIMING, decode=replace(TIMING.decode, step_s=(0.1, 0.11, 0.16, 0.3)), cores=0.0)


@pytest.mark.parametrize("mode", ["async", "tppo"])
def test_idle_shares_do_not_depend_on_the_number_of_steps(mode):
    """The window that a last step overlaps would belong to a step that is not simulated."""
    scenario = make_scenario(make_config(mode))
    workload = Workload(named_lengths(LENGTHS), named_lengths("fixed:length=10"))
    first = scenario.num_settling_steps
    means = [
        compute_means(predict(scenario, workload, SLOW_SERVERS, num_steps=first + steps, seed=1)) for steps in (6, 12, 30)
    ]
    for one in means:
        assert one.rollout_idle == pytest.approx(means[-1].rollout_idle, abs=0.02)
        assert one.trainer_idle == pytest.approx(means[-1].trainer_idle, abs=0.05)
    if mode == "async":
        assert means[0].rollout_idle < 0.05 < means[0].trainer_idle


def test_first_step_of_a_real_run_never_counts(tmp_path):
    config = make_config("sync", num_prompts=4)
    run = read_run(make_run(tmp_path / "sync", config, num_steps=3))
    assert observed(run, make_scenario(config), TIMING).first == 1
