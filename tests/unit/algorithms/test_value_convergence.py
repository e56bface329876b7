"""Laws of megatron_rl/algorithms/value_convergence.py on synthetic curves."""

import json
import math
import random

import pytest

from megatron_rl.algorithms.value_convergence import ValueConvergence


def two_phase_curve(num_steps, *, noise=0.0, plateau=20, seed=0):
    """(loss, explained variance) per step: the head finds the scale, a plateau, then a slow improvement that flattens."""
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
def test_plateau_between_the_phases_is_not_convergence(noise, seed):
    step = stops_at(two_phase_curve(300, noise=noise, seed=seed))
    assert 60 <= step <= 160


def test_critic_that_explains_nothing_never_converges():
    flat = [(1.0, 0.0)] * 200
    assert stops_at(flat) is None
    assert stops_at(flat, min_explained_variance=-1.0) == 24


def test_flat_curves_converge_after_two_and_a_half_windows():
    assert stops_at([(0.5, 0.6)] * 100) == 2 * 10 + 4
    assert stops_at([(0.5, 0.6)] * 100, min_steps=40) == 40
    assert stops_at([(0.5, 0.6)] * 100, window=1) == 2


def test_trend_beyond_the_tolerance_never_converges():
    assert stops_at([(1.0 - 0.004 * step, 0.5) for step in range(200)]) is None
    assert stops_at([(1.0, 0.1 + 0.003 * step) for step in range(200)]) is None


def test_single_flat_comparison_is_not_convergence():
    """A wave crosses its own mean repeatedly, but never stays there."""
    wave = [(1 + 0.5 * math.sin(step / 3), 0.5) for step in range(300)]
    assert stops_at(wave, window=6) is None


def test_convergence_window_of_zero_runs_all_steps():
    assert stops_at([(0.5, 0.6)] * 100, window=0) is None


def test_non_finite_losses_never_converge():
    assert stops_at([(math.nan, 0.5)] * 100) is None
    assert stops_at([(math.inf, 0.5)] * 100) is None


@pytest.mark.parametrize("cut", [0, 7, 25, 70])
def test_convergence_state_survives_a_restart(cut):
    curve = list(two_phase_curve(300, noise=0.01))
    whole = stops_at(curve)
    first = ValueConvergence(window=10, tolerance=0.02)
    for point in curve[:cut]:
        first.update(*point)
    second = ValueConvergence(window=10, tolerance=0.02)
    second.load_state(json.loads(json.dumps(first.state())))
    assert cut + next(i for i, point in enumerate(curve[cut:], start=1) if second.update(*point)) == whole


def test_convergence_rejects_negative_settings():
    with pytest.raises(ValueError, match="0 or more"):
        ValueConvergence(window=-1, tolerance=0.1)
