"""Laws of megatron_rl/algorithms/value_convergence.py on synthetic curves."""

import json
import math
import random

import pytest

from megatron_rl.algorithms.value_convergence import ValueConvergence


def two_phase_curve(num_steps, *, noise=0.0, plateau=20, seed=0):
    """(loss, explained variance): the head finds the scale, a plateau, then knowledge comes in and flattens out."""
    rng = random.Random(seed)
    for step in range(num_steps):
        quick = math.exp(-step / 2)
        slow = 0.6 * (1 - math.exp(-max(0, step - plateau) / 20))
        variance = slow - quick
        yield (1 - variance) * (1 + noise * rng.gauss(0, 1)), variance + noise * rng.gauss(0, 1)


def stops_at(curve, **options):
    settling = ValueConvergence(**{"window": 10, "tolerance": 0.02, **options})
    for step, (loss, variance) in enumerate(curve, start=1):
        if settling.update(loss, variance):
            return step
    return None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_the_plateau_between_the_phases_is_not_the_end(noise, seed):
    step = stops_at(two_phase_curve(300, noise=noise, seed=seed))
    assert 60 <= step <= 160


def test_a_critic_that_explains_nothing_goes_on_to_the_last_step():
    flat = [(1.0, 0.0)] * 200
    assert stops_at(flat) is None
    assert stops_at(flat, min_explained_variance=-1.0) == 24


def test_flat_curves_settle_after_two_windows_and_half_a_window_of_calm():
    assert stops_at([(0.5, 0.6)] * 100) == 2 * 10 + 4
    assert stops_at([(0.5, 0.6)] * 100, min_steps=40) == 40
    assert stops_at([(0.5, 0.6)] * 100, window=1) == 2


def test_a_trend_beyond_the_tolerance_never_settles():
    assert stops_at([(1.0 - 0.004 * step, 0.5) for step in range(200)]) is None
    assert stops_at([(1.0, 0.1 + 0.003 * step) for step in range(200)]) is None


def test_one_lucky_comparison_is_no_standstill():
    """A wave crosses its own mean again and again, but stays there for a moment only."""
    wave = [(1 + 0.5 * math.sin(step / 3), 0.5) for step in range(300)]
    assert stops_at(wave, window=6) is None


def test_a_window_of_zero_means_all_steps():
    assert stops_at([(0.5, 0.6)] * 100, window=0) is None


def test_losses_that_are_not_finite_never_settle():
    assert stops_at([(math.nan, 0.5)] * 100) is None
    assert stops_at([(math.inf, 0.5)] * 100) is None


@pytest.mark.parametrize("cut", [0, 7, 25, 70])
def test_a_restart_changes_nothing(cut):
    curve = list(two_phase_curve(300, noise=0.01))
    whole = stops_at(curve)
    first = ValueConvergence(window=10, tolerance=0.02)
    for point in curve[:cut]:
        first.update(*point)
    second = ValueConvergence(window=10, tolerance=0.02)
    second.load_state(json.loads(json.dumps(first.state())))
    assert cut + next(i for i, point in enumerate(curve[cut:], start=1) if second.update(*point)) == whole


def test_negative_settings_are_refused():
    with pytest.raises(ValueError, match="0 or more"):
        ValueConvergence(window=-1, tolerance=0.1)
