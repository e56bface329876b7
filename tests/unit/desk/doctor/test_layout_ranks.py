"""The update that `doctor --invariance` measures: megatron_rl/desk/doctor/layout_ranks.py."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config.schema import Dtype, ParallelConfig
from megatron_rl.desk.doctor import layout_ranks


@pytest.mark.parametrize("dtype", Dtype)
def test_layouts_are_compared_in_the_requested_dtype(dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 uses a higher learning rate, so that the update exceeds a weight's last bit."""
    built: dict[str, Any] = {}

    class Stop(Exception):
        pass

    def engine(*args: Any, **kwargs: Any) -> None:
        built.update(kwargs)
        raise Stop

    monkeypatch.setattr(layout_ranks, "Engine", engine)
    job = layout_ranks.InvarianceJob("model", "policy", ["tp1"], "", "", is_reference=True, dtype=dtype.value)
    with pytest.raises(Stop):
        layout_ranks.measure(job, ParallelConfig(), SimpleNamespace(), is_reference=True)
    assert built["dtype"] is dtype
    assert built["optimizer"].lr == layout_ranks.OPTIMIZER.lr * (100 if dtype is Dtype.bfloat16 else 1)
