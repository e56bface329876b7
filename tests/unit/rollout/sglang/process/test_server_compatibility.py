"""Laws of attached servers: their reported options are compared with the options of a managed server."""

import json
from dataclasses import replace

import pytest

from megatron_rl.rollout.sglang.process.options import SAID_LABELS, ServerOptions, server_command
from megatron_rl.rollout.sglang.process.server_compatibility import disagreements, nccl_of

OURS = ServerOptions(
    "/m", load_weights=False, tensor_parallel_size=2, device="cuda", nccl={"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
)
GOOD = {"tp_size": 2, "pp_size": 1, "dp_size": 1, "device": "cuda", "enable_memory_saver": False}


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ({}, []),
        ({"tp_size": 4}, ["tp_size 4, rollout.tensor_parallel_size is 2", "--tensor-parallel-size 2"]),
        ({"pp_size": 2}, ["pp_size 2"]),
        ({"dp_size": 2}, ["dp_size 2", "as many servers"]),
        ({"device": "cpu"}, ["runs on cpu and the trainer on cuda", "weight_sync=disk"]),
        ({SAID_LABELS: {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}}, ["NCCL_CUMEM_ENABLE is 1 there and 0 here"]),
        ({SAID_LABELS: {"team": "red"}}, []),
        ({SAID_LABELS: None}, []),
        ({"speculative_algorithm": "EAGLE", "load_format": "dummy"}, ["EAGLE drafts at random", "--speculative-draft-load-format auto"]),
        ({"speculative_algorithm": "EAGLE", "load_format": "dummy", "speculative_draft_load_format": "auto"}, []),
        ({"speculative_algorithm": "NGRAM", "load_format": "dummy"}, []),
        ({"enable_nccl_nvls": True}, ["NCCL_NVLS_ENABLE is 1 there and 0 here"]),
        ({"enable_symm_mem": True}, ["NCCL_CUMEM_ENABLE is 1 there", "NCCL_NVLS_ENABLE is 1 there"]),
    ],
)
def test_options_that_would_hang_a_publish_are_reported_at_start(said, names):
    found = list(disagreements(GOOD | said, OURS, broadcasts=True))
    assert len(found) == bool(names)
    for name in names:
        assert name in found[0]


def test_device_and_nccl_matter_only_with_a_process_group():
    info = GOOD | {"device": "cpu", "enable_symm_mem": True}
    assert not list(disagreements(info, OURS, broadcasts=False))
    assert list(disagreements(info | {"tp_size": 1}, OURS, broadcasts=False))


def test_a_colocated_server_must_be_able_to_sleep():
    (problem,) = disagreements(GOOD, replace(OURS, can_sleep=True), broadcasts=False)
    assert "enable-memory-saver=true" in problem
    assert not list(disagreements(GOOD | {"enable_memory_saver": True}, replace(OURS, can_sleep=True), broadcasts=False))


def test_server_reports_its_nccl_variables():
    command = server_command(replace(OURS, nccl={"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"}), 1)
    said = json.loads(command[command.index("--extra-metric-labels") + 1])
    assert nccl_of({SAID_LABELS: said}) == {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"}


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ({"quantization": "fp8", "load_format": "auto"}, True),
        ({"quantization": "fp8", "load_format": "flash_rl"}, False),
        ({"quantization": None}, False),
    ],
)
def test_quantized_server_must_accept_new_weights(said, refused):
    assert len(list(disagreements(GOOD | said, OURS, broadcasts=True, model_type="qwen3"))) == refused
