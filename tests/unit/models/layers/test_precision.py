"""Precision settings: their fields for Megatron, their arguments for servers, and rejected settings."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.checks import check_config
from megatron_rl.config.schema import Dtype, Fp8, Init, Mtp
from megatron_rl.errors import ConfigError, ModelError
from megatron_rl.models.layers.precision import check_fp8, fp8_kwargs, pack_alignment
from megatron_rl.rollout import server_pool as pool
from megatron_rl.rollout.sglang.process.options import ServerOptions, server_command
from megatron_rl.training import build_engines
from tests.unit.config.test_moe_settings import DENSE, load


def megatron(**fields: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    sizes = dict(num_layers=2, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True)
    return TransformerConfig(**sizes, **fields)


@pytest.mark.parametrize("fp8", [Fp8.hybrid, Fp8.e4m3])
def test_fp8_fields_keep_parameters_in_bfloat16(fp8: Fp8) -> None:
    config = megatron(bf16=True, params_dtype=torch.bfloat16, **fp8_kwargs(fp8))
    assert (config.fp8, config.fp8_recipe, config.fp8_param) == (fp8.value, "tensorwise", False)


def test_no_fp8_changes_no_field() -> None:
    assert fp8_kwargs(Fp8.none) == {} and megatron().fp8 is None
    check_fp8(Fp8.none, torch.float32)


def test_packs_are_padded_for_8_bit_products() -> None:
    fp8 = fp8_kwargs(Fp8.hybrid)
    assert pack_alignment(megatron()) == 1
    assert pack_alignment(megatron(**fp8)) == 16
    split = dict(tensor_model_parallel_size=4, sequence_parallel=True)
    assert pack_alignment(megatron(**split)) == 4
    assert pack_alignment(megatron(**split, **fp8)) == 64


def test_fp8_needs_bfloat16_a_gpu_and_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="policy.fp8=hybrid: needs parameters in bfloat16, got float32"):
        check_fp8(Fp8.hybrid, torch.float32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match="policy.fp8=e4m3: needs a GPU, and none is present; set none"):
        check_fp8(Fp8.e4m3, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="needs Transformer Engine, which is not installed"):
        check_fp8(Fp8.e4m3, torch.bfloat16)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ModelError, match=r"NVIDIA A100 \(compute capability 8.0\) has no 8-bit products"):
        check_fp8(Fp8.e4m3, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    check_fp8(Fp8.e4m3, torch.bfloat16)


def test_fp8_with_float32_is_rejected_before_anything_starts(tmp_path: Path) -> None:
    config = load(tmp_path, DENSE)
    config.policy.fp8 = Fp8.hybrid
    with pytest.raises(ConfigError, match="policy.fp8=hybrid: needs parameters in bfloat16, got policy.dtype=float32"):
        check_config(config, command="train")
    config.policy.dtype = Dtype.bfloat16
    check_config(config, command="train")


def test_mtp_layers_can_be_kept_only_from_a_checkpoint(tmp_path: Path) -> None:
    config = load(tmp_path, DENSE)
    config.policy.mtp, config.policy.init = Mtp.keep, Init.random
    with pytest.raises(ConfigError, match="policy.mtp=keep: random weights .* have no layers to keep; set it to drop"):
        check_config(config, command="train")


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


@pytest.mark.parametrize("own", [None, *Dtype])
def test_critic_precision_defaults_to_the_policy(own: Dtype | None, tmp_path: Path) -> None:
    config = load(tmp_path, DENSE)
    config.policy.dtype = Dtype.bfloat16
    assert config.critic.dtype is None
    config.critic.dtype = own
    built = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_engines, "Engine", lambda *args, **kwargs: built.append(kwargs["dtype"]))
        build_engines.build_engine(config, None, "critic", config.critic, None)
        build_engines.build_engine(config, None, "policy", config.policy, None)
    assert built == [own or Dtype.bfloat16, Dtype.bfloat16]
