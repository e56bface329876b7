"""Servers are started, or attached to, with the precision that the recipe sets."""

from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.schema import Dtype
from megatron_rl.rollout import server_pool as pool
from megatron_rl.rollout.sglang.process.options import ServerOptions, server_command
from tests.unit.config.recipes import DENSE, load


def test_attached_servers_are_not_assumed_to_use_fp32_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: dict[str, Any] = {"dtype": "bfloat16", "enable_fp32_lm_head": False}
    monkeypatch.setattr("megatron_rl.rollout.sglang.process.attached_server._ask", lambda *args: said)
    monkeypatch.setattr("megatron_rl.rollout.sglang.process.attached_server.AttachedServer.go_on", lambda server: None)

    def notes_of(dtype: Dtype) -> list[str]:
        config, notes = load(tmp_path / dtype.value, DENSE), []
        config.rollout.urls, config.policy.dtype = ["http://127.0.0.1:1"], dtype
        pool.open_servers(config, tmp_path, notes.append, load_weights=False)
        return notes[1:]  # after "attaching to ..."

    for dtype in Dtype:
        (tmp_path / dtype.value).mkdir()
    (rounds,) = notes_of(Dtype.bfloat16)
    assert "http://127.0.0.1:1 rounds logits to bfloat16" in rounds and "--enable-fp32-lm-head" in rounds
    (other,) = notes_of(Dtype.float32)
    assert "computes in bfloat16, the trainer in policy.dtype=float32" in other


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("given", [{}, {"enable-fp32-lm-head": True}, {"--enable_fp32_lm_head": True}])
def test_started_servers_compute_float32_logits(
    dtype: Dtype, given: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(pool.ServerPool, "start", lambda options, *args, **kwargs: started.append(options))
    config = load(tmp_path, DENSE)
    config.policy.dtype, config.rollout.server_args = dtype, given
    pool.open_servers(config, tmp_path, lambda text: None, load_weights=False)
    expected = 1 if given or dtype is Dtype.bfloat16 else 0
    assert server_command(started[0], 1).count("--enable-fp32-lm-head") == expected


def test_server_arguments_can_disable_float32_logits() -> None:
    options = ServerOptions(model_path="m", dtype="bfloat16", server_args={"enable-fp32-lm-head": False})
    assert "--enable-fp32-lm-head" not in server_command(options, 1)
