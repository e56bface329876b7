"""Departures of replayed steps: exactly where nothing is computed in floating point, else by device."""

import math

from megatron_rl.desk.doctor.check_compare import Deviation, departures, describe, tolerance


def found(made, recorded, **options):
    return [str(departure) for departure in departures(2, "advantages", made, recorded, **{"on_gpu": False} | options)]


def test_numbers_may_differ_by_the_devices_share_of_the_largest():
    recorded = {"advantages": [0.001, -2.0]}
    assert not found({"advantages": [0.0013, -2.0]}, recorded)
    (said,) = found({"advantages": [0.002, -2.0]}, recorded)
    assert said.startswith("step 2, the advantages: advantages 0.002 instead of 0.001 (number 1 of 2), 5.0e-04 of the largest")
    assert not found({"advantages": [0.002, -2.0]}, recorded, on_gpu=True)
    assert found({"advantages": [0.05, -2.0]}, recorded, on_gpu=True)


def test_what_is_not_finite_or_of_another_length_departs():
    assert found({"loss": [math.nan]}, {"loss": [1.0]}) and found({"loss": [math.inf]}, {"loss": [1.0]})
    assert "are 1 instead of 2" in found({"values": [1.0]}, {"values": [1.0, 2.0]})[0]
    assert not found({"values": [0.0]}, {"values": [0.0]}) and not found({"rewards": []}, {"rewards": []})


def test_the_weights_of_a_step_take_one_line():
    found = [Deviation(1, "publish", f"weights w{i}", "differ") for i in range(3)] + [Deviation(2, "publish", "weights w0", "differ")]
    assert describe(found) == [
        "step 1, the policy's optimizer step: weights w0 differ (and 2 more tensors)",
        "step 2, the policy's optimizer step: weights w0 differ",
    ]


def test_exact_quantities_have_no_tolerance_and_missing_ones_are_said():
    assert tolerance("rewards", on_gpu=True) == tolerance("policy lr", on_gpu=True) == 0.0
    assert found({"rewards": [0.5000001]}, {"rewards": [0.5]}, on_gpu=True)
    assert "are others (a instead of b)" in found({"prompts": "a"}, {"prompts": "b"})[0]
    assert found({}, {"values": [1.0]}) == ["step 2, the advantages: values is not made here"]
    assert found({"more": [1.0]}, {}) == ["step 2, the advantages: more is not in the record"]
