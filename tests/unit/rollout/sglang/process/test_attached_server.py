"""Attached servers: checks that a run makes, and servers that it rejects, before it sends them weights."""

import json
from dataclasses import replace

import pytest
from aiohttp import web

from megatron_rl.config.schema import Config, Placement, PolicyConfig, RolloutConfig
from megatron_rl.rollout.requests import ServerError
from megatron_rl.rollout.server_pool import attach_one, open_servers
from megatron_rl.rollout.sglang.process.attached_server import AttachedServer, disagreements, nccl_of
from megatron_rl.rollout.sglang.process.options import SAID_LABELS, ServerOptions, server_command
from tests.unit.local_service import local_service

INFO = {"startup_time": 1.0, "random_seed": 2, "launch_command": "serve", "tp_size": 1, "pp_size": 1, "dp_size": 1, "device": "cpu"}


def served(path, body):
    if path in ("/server_info", "/model_info", "/continue_generation"):
        return INFO if path == "/server_info" else {}
    return web.Response(status=404)


def with_seed(seed, **info):
    """Another process answers."""
    return lambda path, body: {**INFO, "random_seed": seed, **info} if path == "/server_info" else served(path, body)


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    return Config(policy=PolicyConfig(path=str(tmp_path)), rollout=RolloutConfig())


@pytest.mark.parametrize(("load_weights", "told"), [(False, 1), (True, 0)])
def test_run_with_a_trainer_resumes_servers_left_paused_by_a_killed_run(config, tmp_path, load_weights, told):
    with local_service(served) as service:
        config.rollout.urls = [service.url]
        open_servers(config, tmp_path, lambda text: None, load_weights=load_weights)
        assert [path for path, _ in service.requests].count("/continue_generation") == told


def test_joining_server_left_paused_is_resumed(config):
    with local_service(served) as service:
        attach_one(service.url, config, lambda text: None)
        assert "/continue_generation" in [path for path, _ in service.requests]


def test_server_that_cannot_resume_raises_with_a_remedy():
    def answer(path, body):
        return web.Response(status=500, text="no") if path == "/continue_generation" else served(path, body)

    with local_service(answer) as service:
        with pytest.raises(ServerError, match="answered /continue_generation with 500: no.*restart it"):
            AttachedServer(service.url).go_on()
        server = AttachedServer(service.url)
    with pytest.raises(ServerError, match="did not answer /continue_generation"):
        server.go_on()


@pytest.mark.parametrize("workers", [[{"url": "http://a:1", "is_healthy": True}, {"url": "http://b:2"}], ["http://a:1", "http://b:2"]])
def test_router_next_to_other_urls_is_rejected_with_its_servers(config, tmp_path, workers):
    """sglang-router answers like a server, but weights would be sent to only one of the servers behind it."""

    def answer(path, body):
        return {"workers": workers, "total": len(workers)} if path == "/workers" else served(path, body)

    with local_service(answer) as service, local_service(with_seed(3)) as server:
        config.rollout.urls = [server.url, service.url]
        with pytest.raises(ServerError, match=r"is a router.*next to other entries list them: http://a:1,http://b:2"):
            open_servers(config, tmp_path, lambda text: None, load_weights=False)
        assert "/continue_generation" not in [path for path, _ in service.requests]


@pytest.mark.parametrize("key", ["urls", "urls_file"])
def test_single_router_url_is_replaced_by_its_servers(config, tmp_path, key):
    workers: list[dict[str, object]] = []

    def listing(path, body):
        return {"workers": workers} if path == "/workers" else web.Response(status=404)

    with local_service(served) as first, local_service(with_seed(3)) as second:
        workers += [{"url": first.url + "/", "is_healthy": False}, {"url": second.url}]
        with local_service(listing) as router:
            setattr(config.rollout, key, [router.url + "/"] if key == "urls" else router.url)
            notes: list[str] = []
            pool = open_servers(config, tmp_path, notes.append, load_weights=False)
            assert pool.urls == [first.url, second.url] and pool.named_by == router.url
            assert f"attaching to 2 SGLang servers, listed by {router.url}" in notes[0]
            assert {path for path, _ in router.requests} == {"/workers"}
            config.rollout.placement = Placement.colocated
            with pytest.raises(ServerError, match="colocated servers must be listed"):
                open_servers(config, tmp_path, notes.append, load_weights=False)


@pytest.mark.parametrize(
    "answer", [web.Response(status=404), web.Response(text="<html>"), web.json_response({"workers": 3}), web.json_response([])]
)
def test_url_without_a_workers_endpoint_is_a_server(answer):
    body, status, kind = answer.body, answer.status, answer.content_type

    def handler(path, asked):
        return web.Response(body=body, status=status, content_type=kind) if path == "/workers" else served(path, asked)

    with local_service(handler) as service:
        assert AttachedServer(service.url).server_info() == INFO


def test_server_listed_under_two_addresses_is_rejected(config, tmp_path):
    """Weight sync would wait for the second one forever."""
    with local_service(served) as service, local_service(with_seed(3)) as other:
        alias = service.url.replace("127.0.0.1", "localhost")
        config.rollout.urls = [service.url, other.url, alias]
        with pytest.raises(ServerError, match=f"{alias} is the server at {service.url} under another address; list each server once"):
            open_servers(config, tmp_path, lambda text: None, load_weights=False)
        config.rollout.urls = [service.url]
        pool = open_servers(config, tmp_path, lambda text: None, load_weights=False)
        with pytest.raises(ServerError, match="under another address"):
            pool.add(attach_one(alias, config, lambda text: None))
        pool.add(attach_one(other.url, config, lambda text: None))
        assert pool.urls == [service.url, other.url]


def test_attached_server_with_a_model_of_another_size_is_rejected(config, tmp_path):
    """Layers that the trainer does not have would keep the weights that the server loaded."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "num_hidden_layers": 2}')
    (tmp_path / "same").mkdir()
    (tmp_path / "same" / "config.json").write_text('{"model_type": "qwen2", "num_hidden_layers": 2, "dtype": "float16"}')
    (tmp_path / "larger").mkdir()
    (tmp_path / "larger" / "config.json").write_text('{"model_type": "qwen2", "num_hidden_layers": 4}')
    for folder in ("same", "larger", "absent"):
        with local_service(with_seed(3, model_path=str(tmp_path / folder))) as service:
            if folder != "larger":
                attach_one(service.url, config, lambda text: None)
                continue
            with pytest.raises(ServerError, match=r"another model, .*/larger: num_hidden_layers 4 \(policy.path: 2\); start it with"):
                attach_one(service.url, config, lambda text: None)


def test_evaluation_server_cannot_join(config):
    with local_service(served) as service:
        config.eval.urls = [service.url + "/"]
        with pytest.raises(ServerError, match="it is in eval.urls too"):
            attach_one(service.url, config, lambda text: None)


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
