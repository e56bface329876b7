"""Laws of environment variables for GPUs: required GPUs, NCCL on both sides, expandable segments."""

import sysconfig

import pytest

from megatron_rl.errors import UserError
from megatron_rl.rollout.sglang.process.options import ServerOptions, server_environment
from megatron_rl.system.gpu.gpu_environment import (
    NCCL_DEFAULTS,
    check_required_gpus,
    expandable_segments,
    nccl_values,
    own_cuda_home,
    set_gpu_defaults,
    without_expandable_segments,
)


@pytest.mark.parametrize(("value", "num_gpus", "refused"), [("1", 0, True), ("1", 1, False), ("0", 0, False), (None, 0, False)])
def test_missing_required_gpu_raises_with_remedies(value, num_gpus, refused):
    environ = {} if value is None else {"MEGATRON_RL_REQUIRE_GPU": value}
    if not refused:
        return check_required_gpus(num_gpus, environ)
    with pytest.raises(UserError, match=r"MEGATRON_RL_REQUIRE_GPU=1, but torch finds no GPU.*--gpus-per-node.*=0 to compute on CPUs"):
        check_required_gpus(num_gpus, environ)


def test_exported_variables_override_defaults_and_reach_servers():
    environ = {"NCCL_CUMEM_ENABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    set_gpu_defaults(environ)
    assert environ == {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert nccl_values(environ) == {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
    assert nccl_values({}) == NCCL_DEFAULTS


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ({}, ("0", "0")),
        ({"NCCL_NVLS_ENABLE": "1"}, ("1", "1")),
        ({"NCCL_NVLS_ENABLE": "1", "NCCL_CUMEM_ENABLE": "0"}, ("1", "0")),
        ({"NCCL_CUMEM_ENABLE": "1"}, ("0", "1")),
    ],
)
def test_one_variable_sets_nvls_and_cumem_for_trainer_and_servers(given, values):
    expected = dict(zip(("NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE"), values, strict=True))
    environ = dict(given)
    set_gpu_defaults(environ)
    options = ServerOptions("/m", device="cuda", nccl=nccl_values(environ))
    assert {name: environ[name] for name in expected} == expected == nccl_values(given)
    server = server_environment(options, environ, [0])
    assert {name: server[name] for name in expected} == expected


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("value", "is_on", "left"),
    [
        ("expandable_segments:True", True, None),
        ("max_split_size_mb:64, expandable_segments: true", True, "max_split_size_mb:64"),
        ("expandable_segments:False,garbage_collection_threshold:0.8", False, "garbage_collection_threshold:0.8"),
        ("max_split_size_mb:64", False, "max_split_size_mb:64"),
    ],
)
def test_sleeping_server_loses_only_expandable_segments(name, value, is_on, left):
    environ = {name: value, "PATH": "/bin"}
    assert bool(expandable_segments(environ)) is is_on
    kept = without_expandable_segments(environ)
    assert kept == {"PATH": "/bin"} | ({name: left} if left else {}) and environ[name] == value


def test_cuda_home_is_the_environments_toolkit_if_it_has_nvcc(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "nvidia" / "cu13" / "bin").mkdir(parents=True)
    assert own_cuda_home() == {}
    (tmp_path / "nvidia" / "cu13" / "bin" / "nvcc").touch()
    assert own_cuda_home() == {"CUDA_HOME": str(tmp_path / "nvidia" / "cu13")}
