"""Deviations of replayed steps: exact for quantities without floating point, otherwise within the device's tolerance."""

import math

from megatron_rl.desk.doctor.check_installation import Deviation, departures, describe, tolerance


def deviations_of(made, recorded, **options):
    return [str(departure) for departure in departures(2, "advantages", made, recorded, **{"on_gpu": False} | options)]


def test_values_may_differ_by_the_tolerance_of_the_device():
    recorded = {"advantages": [0.001, -2.0]}
    assert not deviations_of({"advantages": [0.0013, -2.0]}, recorded)
    (text,) = deviations_of({"advantages": [0.002, -2.0]}, recorded)
    assert text.startswith("step 2, the advantages: advantages 0.002 instead of 0.001 (value 1 of 2), 5.0e-04 of the largest")
    assert not deviations_of({"advantages": [0.002, -2.0]}, recorded, on_gpu=True)
    assert deviations_of({"advantages": [0.05, -2.0]}, recorded, on_gpu=True)


def test_non_finite_values_and_other_lengths_deviate():
    assert deviations_of({"loss": [math.nan]}, {"loss": [1.0]}) and deviations_of({"loss": [math.inf]}, {"loss": [1.0]})
    assert "are 1 instead of 2" in deviations_of({"values": [1.0]}, {"values": [1.0, 2.0]})[0]
    assert not deviations_of({"values": [0.0]}, {"values": [0.0]}) and not deviations_of({"rewards": []}, {"rewards": []})


def test_weights_of_one_step_share_a_line():
    deviations = [Deviation(1, "publish", f"weights w{i}", "differ") for i in range(3)] + [Deviation(2, "publish", "weights w0", "differ")]
    assert describe(deviations) == [
        "step 1, the policy's optimizer step: weights w0 differ (and 2 more tensors)",
        "step 2, the policy's optimizer step: weights w0 differ",
    ]


def test_exact_quantities_have_no_tolerance_and_missing_ones_deviate():
    assert tolerance("rewards", on_gpu=True) == tolerance("policy lr", on_gpu=True) == 0.0
    assert deviations_of({"rewards": [0.5000001]}, {"rewards": [0.5]}, on_gpu=True)
    assert "differ (a instead of b)" in deviations_of({"prompts": "a"}, {"prompts": "b"})[0]
    assert deviations_of({}, {"values": [1.0]}) == ["step 2, the advantages: values is not computed here"]
    assert deviations_of({"more": [1.0]}, {}) == ["step 2, the advantages: more is not in the record"]
