"""The garbage collector is off during imports, collects only young objects during a run, and is restored afterwards."""

import gc
import weakref

import pytest

from megatron_rl.system.processes.gc_pauses import gc_between_windows, gc_disabled, gc_young_only


def test_the_collector_rests_inside_also_one_in_another_and_works_again_after_an_error():
    before = gc.get_freeze_count()
    try:
        with pytest.raises(ImportError), gc_disabled():
            with gc_disabled():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() and gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


class Knot:
    def __init__(self):
        self.own = self


def test_a_run_looks_at_old_objects_when_it_says_so_and_never_at_what_was_there():
    limits, there = gc.get_threshold(), Knot()
    try:
        with gc_young_only():
            made = Knot()
            gc.collect(0)  # not among the youngest any more
            gone, kept = weakref.ref(made), weakref.ref(there)
            del made, there
            young, middle, old = gc.get_threshold()
            assert young == limits[0] and middle > 10**9 and old > 10**9  # collections of what is younger
            assert gone() is not None
            gc.collect()
            assert gone() is None and kept() is not None
        assert gc.get_threshold() == limits
    finally:
        gc.unfreeze()
        gc.collect()


def test_garbage_of_a_step_is_collected_after_it_and_older_garbage_within_ten_steps():
    with gc_young_only():
        lasting = Knot()
        gc_between_windows(0)
        made = Knot()
        gone, later = weakref.ref(made), weakref.ref(lasting)
        del made, lasting
        gc_between_windows(1)
        assert gone() is None and later() is not None
        for step in range(2, 11):
            gc_between_windows(step)
        assert later() is None
    gc.unfreeze()
