"""The collector rests while modules are imported, and works afterwards."""

import gc

import pytest

from megatron_rl.system.collector import collector_at_rest


def test_the_collector_rests_inside_also_one_in_another_and_works_again_after_an_error():
    before = gc.get_freeze_count()
    try:
        with pytest.raises(ImportError), collector_at_rest():
            with collector_at_rest():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() and gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
