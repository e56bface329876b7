"""Size of SGLang's pool of recurrent states on a CPU; the functions themselves: test_delta_rule.py, integration/test_linear_serving.py."""

import sys
from types import SimpleNamespace

import pytest

from megatron_rl.cpu.sglang_delta_net import bound_states

BY_MEMORY = 100_000


@pytest.mark.parametrize(
    ("given", "running", "by_memory", "expected"),
    [
        (None, None, BY_MEMORY, 8192),
        (None, 512, BY_MEMORY, 2048),
        (None, 512, 300, 300),  # a large model: memory is the limit
        (9999, 512, BY_MEMORY, 9999),  # a user's max-mamba-cache-size
    ],
)
def test_pool_has_room_for_running_requests_and_no_more(
    given: int | None, running: int | None, by_memory: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = SimpleNamespace(max_mamba_cache_size=given, max_running_requests=running)
    context = SimpleNamespace(override=lambda reason, **values: vars(schedule).update(values))
    fake = SimpleNamespace(get_schedule=lambda: schedule, get_context=lambda: context)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", fake)

    class Configurator:
        def _handle_max_mamba_cache(self, free_gb: float) -> float:
            schedule.max_mamba_cache_size = schedule.max_mamba_cache_size or by_memory
            return free_gb / 2

    bound_states(Configurator)
    assert (Configurator()._handle_max_mamba_cache(8.0), schedule.max_mamba_cache_size) == (4.0, expected)
