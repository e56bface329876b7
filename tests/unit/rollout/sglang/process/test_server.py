"""Laws of server start-up that need no server: command line, environment, refusals and diagnosis."""

import importlib.util
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron_rl import cli
from megatron_rl.config.checks.servers import address_problems
from megatron_rl.config.schema import Config, Placement, RolloutConfig
from megatron_rl.rollout import server_pool as pool
from megatron_rl.rollout.requests import ServerError
from megatron_rl.rollout.server_pool import ServerPool
from megatron_rl.rollout.sglang.process import server as server_module
from megatron_rl.rollout.sglang.process.cleanup import write_secret
from megatron_rl.rollout.sglang.process.options import ServerOptions, server_command, server_environment
from megatron_rl.rollout.sglang.process.server import (
    SglangServer,
    free_port,
    group_members,
    last_lines,
    port_is_free,
    port_taken,
    remedy,
    start_failure,
)
from tests.unit.local_service import local_service


def flags_of(command: list[str]) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {}
    for word in command[3:]:
        if word.startswith("--"):
            flags[word] = []
        else:
            flags[list(flags)[-1]].append(word)
    return flags


def test_the_command_line_carries_the_options():
    options = ServerOptions("/m", dtype="bfloat16", tensor_parallel_size=2, deterministic=True, device="cuda")
    command = server_command(options, port=1234)
    flags = flags_of(command)
    assert command[1:3] == ["-m", "sglang.launch_server"]
    assert flags["--model-path"] == ["/m"] and flags["--port"] == ["1234"] and flags["--dtype"] == ["bfloat16"]
    assert flags["--tensor-parallel-size"] == ["2"] and flags["--device"] == ["cuda"]
    assert flags["--enable-deterministic-inference"] == []
    assert "--load-format" not in flags


def test_an_idle_server_leaves_the_cores_of_a_cpu_to_the_trainer():
    assert "--sleep-on-idle" in flags_of(server_command(ServerOptions("/m"), port=1))
    assert "--sleep-on-idle" not in flags_of(server_command(ServerOptions("/m", device="cuda"), port=1))


def test_options_that_are_off_leave_no_flag():
    flags = flags_of(server_command(ServerOptions("/m", tokenizer=True), port=1))
    assert "--enable-deterministic-inference" not in flags and "--skip-tokenizer-init" not in flags


def test_a_server_without_weights_loads_dummies():
    assert flags_of(server_command(ServerOptions("/m", load_weights=False), port=1))["--load-format"] == ["dummy"]


def test_server_args_override_options_and_accept_flags_values_and_lists():
    server_args = {"dtype": "float16", "disable_radix_cache": True, "skip-server-warmup": False, "lora-paths": ["a", 2]}
    flags = flags_of(server_command(ServerOptions("/m", server_args=server_args), port=1))
    assert flags["--dtype"] == ["float16"]
    assert flags["--disable-radix-cache"] == []
    assert flags["--lora-paths"] == ["a", "2"]
    assert "--skip-server-warmup" not in flags


def test_the_server_does_not_inherit_torchruns_rendezvous():
    base = {"RANK": "0", "MASTER_ADDR": "node1", "PATH": "/bin", "OMP_NUM_THREADS": "8"}
    env = server_environment(ServerOptions("/m", env={"MINE": "1"}), base, cores=[0, 1])
    assert "RANK" not in env and "MASTER_ADDR" not in env
    assert env["PATH"] == "/bin" and env["MINE"] == "1" and env["OMP_NUM_THREADS"] == "1"
    assert env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    assert env["SGLANG_VLM_CACHE_SIZE_MB"] == "0"


@pytest.mark.parametrize(
    ("num_ranks", "num_threads", "cores", "binding"),
    [(2, 1, [0, 1], "0|1"), (2, 2, [4, 5, 6, 7], "4,5|6,7"), (2, 1, [3], "3|3")],
)
def test_tensor_parallel_ranks_get_separate_cores(num_ranks, num_threads, cores, binding):
    options = ServerOptions("/m", tensor_parallel_size=num_ranks, num_threads=num_threads)
    assert server_environment(options, {}, cores)["SGLANG_CPU_OMP_THREADS_BIND"] == binding


def test_a_gpu_server_keeps_its_thread_settings():
    env = server_environment(ServerOptions("/m", device="cuda"), {"OMP_NUM_THREADS": "8"}, cores=[0])
    assert env["OMP_NUM_THREADS"] == "8"


def test_gpu_server_uses_the_cuda_toolkit_of_its_environment_by_default(monkeypatch):
    monkeypatch.setattr("megatron_rl.rollout.sglang.process.options.own_cuda_home", lambda: {"CUDA_HOME": "/venv/cu13"})
    options = ServerOptions("/m", device="cuda")
    assert server_environment(options, {}, cores=[0])["CUDA_HOME"] == "/venv/cu13"
    assert server_environment(options, {"CUDA_HOME": "/usr/local/cuda"}, cores=[0])["CUDA_HOME"] == "/usr/local/cuda"
    assert "CUDA_HOME" not in server_environment(ServerOptions("/m", device="cpu"), {}, cores=[0])


def test_server_gets_and_reports_the_trainers_nccl_variables(monkeypatch):
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    options = pool.server_options(Config(), load_weights=False, tokenizer=False)
    env = server_environment(options, {}, cores=[0])
    assert (env["NCCL_CUMEM_ENABLE"], env["NCCL_NVLS_ENABLE"]) == ("1", "0")
    assert "--extra-metric-labels" in server_command(options, 1)


def test_sleeping_server_runs_without_expandable_segments():
    base = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64"}
    awake, asleep = (server_environment(ServerOptions("/m", device="cuda", can_sleep=one), base, [0]) for one in (False, True))
    assert awake["PYTORCH_CUDA_ALLOC_CONF"] == base["PYTORCH_CUDA_ALLOC_CONF"]
    assert asleep["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    named = ServerOptions("/m", device="cuda", server_args={"enable_memory_saver": True})
    assert server_environment(named, base, [0])["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"


def test_sleeping_server_frees_its_cuda_graphs_and_sglang_knows_every_variable_that_is_set():
    """A variable that SGLang renames would be ignored without a word: 2 GB stay taken, or images keep stale outputs."""
    options = ServerOptions("/m", device="cpu", tensor_parallel_size=2, can_sleep=True)
    env = server_environment(options, {}, cores=[0])
    assert env["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "1"
    assert "SGLANG_MEMORY_SAVER_CUDA_GRAPH" not in server_environment(replace(options, can_sleep=False), {}, cores=[0])
    sources = Path(next(iter(importlib.util.find_spec("sglang").submodule_search_locations))) / "srt"
    ours = [name for name in env if name.startswith("SGLANG_")]
    missing = [name for name in ours if subprocess.run(["grep", "-rqF", "--include=*.py", name, sources], check=False).returncode]
    assert len(ours) >= 5 and missing == []


def test_float32_gpu_server_uses_an_attention_backend_with_kernels():
    def backend(**options):
        return flags_of(server_command(ServerOptions("/m", deterministic=True, **options), 1)).get("--attention-backend")

    assert backend(device="cuda", dtype="float32") == ["triton"]
    assert backend(device="cuda", dtype="bfloat16") is None is backend(device="cpu", dtype="float32")
    assert backend(device="cuda", dtype="float32", server_args={"attention_backend": "flex_attention"}) == ["flex_attention"]


def test_attached_servers_are_compared_before_the_run_uses_them(tmp_path, model_folder):
    def answer(path, body):
        return {"weight_version": "1", "tp_size": 2, "dp_size": 1, "device": "cpu"}

    with local_service(answer) as service:
        config = run_config(tmp_path, urls=[service.url])
        with pytest.raises(ServerError, match=f"{service.url}: it has tp_size 2, rollout.tensor_parallel_size is 1"):
            pool.open_servers(config, tmp_path, lambda text: None, load_weights=False)
        config.rollout.tensor_parallel_size = 2
        assert pool.open_servers(config, tmp_path, lambda text: None, load_weights=False).urls == [service.url]


@pytest.fixture
def model_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def test_port_in_use_is_rejected_before_a_process_starts(model_folder, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = SglangServer(ServerOptions(model_folder, port=port), tmp_path / "log")
        with pytest.raises(ServerError, match=f"port {port} on 127.0.0.1 is in use.*rollout.port"):
            server.start()
        assert server.pid is None and server.incarnation == 0
    assert port_is_free("127.0.0.1", port)


def test_automatic_ports_are_outside_the_ephemeral_range(monkeypatch):
    assert free_port("127.0.0.1") not in server_module.ephemeral_ports()
    monkeypatch.setattr(server_module, "ephemeral_ports", lambda: range(1024, 65_536))
    assert free_port("127.0.0.1") > 0


SECOND_START_LOSES_ITS_PORT = """
import http.server, pathlib, sys
starts = pathlib.Path(sys.argv[2])
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
if len(starts.read_text()) == 2:
    sys.exit("OSError: [Errno 98] Address already in use")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_restarted_server_keeps_its_url_if_its_port_was_taken(model_folder, tmp_path, monkeypatch):
    def command(options, port, secret):
        return [sys.executable, "-c", SECOND_START_LOSES_ITS_PORT, str(port), str(tmp_path / "starts")]

    monkeypatch.setattr(server_module, "server_command", command)
    with SglangServer(ServerOptions(model_folder), tmp_path / "log") as server:
        url = server.url
        server.restart()
        assert server.url == url and server.incarnation == 3 and server.num_restarts == 1


def test_missing_model_folder_is_rejected_before_a_process_starts(tmp_path):
    server = SglangServer(ServerOptions(str(tmp_path / "nowhere")), tmp_path / "log")
    with pytest.raises(ServerError, match="no config.json in the model folder.*nowhere.*policy.path"):
        server.start()
    assert server.pid is None


def test_pool_stops_all_servers_when_one_cannot_start(model_folder, tmp_path):
    with socket.socket() as taken:
        while True:
            first = free_port("127.0.0.1")
            try:
                taken.bind(("127.0.0.1", first + 1))
                break
            except (OSError, OverflowError):
                continue
        taken.listen()
        with pytest.raises(ServerError, match=f"port {first + 1}"):
            ServerPool.start(ServerOptions(model_folder, port=first), 2, tmp_path)
        assert port_is_free("127.0.0.1", first)


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "first", "noted"),
    [(8, 4, 4, False), (6, 4, 4, False), (5, 4, 0, True), (1, 1, 0, True), (0, 2, 0, False)],
)
def test_servers_take_the_gpus_after_the_trainers_if_there_are_enough(
    monkeypatch, num_gpus, num_ranks, first, noted
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
    monkeypatch.setattr(pool, "count_gpus", lambda: num_gpus)
    notes = []
    rollout = RolloutConfig(num_servers=1, tensor_parallel_size=2)
    assert pool.first_free_gpu(rollout, notes.append) == first
    assert bool(notes) == noted


def test_gpu_server_command_has_its_gpus_and_memory_saver(model_folder):
    command = server_command(ServerOptions(model_folder, device="cuda", first_gpu=4, can_sleep=True), 1)
    assert command[command.index("--base-gpu-id") + 1] == "4" and "--enable-memory-saver" in command
    assert "--enable-memory-saver" not in server_command(ServerOptions(model_folder, device="cuda"), 1)
    assert "--base-gpu-id" not in server_command(ServerOptions(model_folder), 1)


def test_attaching_to_a_dead_url_raises_with_url_and_remedy():
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    with pytest.raises(ServerError, match=f"{url}.*rollout.urls"):
        ServerPool.attach([url])


def test_attaching_twice_to_one_server_is_rejected():
    with pytest.raises(ValueError, match="twice"):
        ServerPool.attach(["http://a:1", "http://a:1"])


def test_group_members_are_the_running_processes_of_the_group():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    try:
        assert group_members(process.pid) == [process.pid]
    finally:
        process.kill()
    deadline = time.monotonic() + 30
    while group_members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert group_members(process.pid) == []  # a zombie until wait() collects it
    process.wait()


@pytest.mark.parametrize(
    ("log", "advice"),
    [
        ("[Errno 98] Address already in use", "rollout.port"),
        ("The checkpoint has model type `x` but Transformers does not recognize this architecture", "model_type"),
        ("launch_server.py: error: unrecognized arguments: --dtyp", "rollout.server_args"),
        ("RuntimeError: Cannot find any model weights with `/m`", "safetensors"),
        ("torch.OutOfMemoryError: CUDA out of memory", "mem-fraction-static"),
        ("ModuleNotFoundError: No module named 'sgl_kernel'", "platform plugin"),
        ("ModuleNotFoundError: No module named 'orjson'", "requirements"),
        ("something else", "first error"),
    ],
)
def test_each_known_failure_has_its_remedy(log, advice):
    assert advice in remedy(log)


def test_port_taken_matches_only_port_conflicts():
    assert port_taken("OSError: [Errno 98] Address already in use")
    assert not port_taken("Uvicorn running on port 31000")


def test_start_failure_reports_the_exit_and_the_end_of_the_log(tmp_path):
    message = start_failure("http://h:1", -9, tmp_path / "log", "last words")
    assert "killed by signal 9" in message and message.endswith("last words")
    assert "exited with code 2" in start_failure("http://h:1", 2, tmp_path / "log", "")


def test_last_lines_skip_earlier_runs_and_are_truncated(tmp_path):
    log = tmp_path / "log"
    log.write_text("old run\n")
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("".join(f"line {i}\n\n" for i in range(50)) + "x" * 1000 + "\n")
    lines = last_lines(log, start, count=3).split("\n")
    assert lines == ["line 48", "line 49", "x" * 500]
    assert "old run" not in last_lines(log, start, count=1000)
    assert last_lines(tmp_path / "absent", 0) == ""


def test_api_key_is_in_no_command_line_environment_or_repr(tmp_path):
    options = ServerOptions("/m", api_key="s3cret", server_args={"mem-fraction-static": 0.5})
    path = write_secret(options, tmp_path)
    command = server_command(options, 1234, path)
    assert flags_of(command)["--config"] == [path] and path.startswith(str(tmp_path)) and path.endswith(".yaml")
    assert Path(path).stat().st_mode & 0o077 == 0
    assert yaml.safe_load(Path(path).read_text()) == {"api-key": "s3cret"}
    shown = [" ".join(command), repr(options), str(server_environment(options, {}, [0]))]
    assert not [text for text in shown if "s3cret" in text]
    assert write_secret(ServerOptions("/m"), tmp_path) == ""
    assert "--config" not in flags_of(server_command(ServerOptions("/m"), 1))


def test_user_config_file_is_merged_into_the_secret_config(tmp_path):
    (tmp_path / "own.yaml").write_text("mem-fraction-static: 0.5\n")
    (tmp_path / "private").mkdir()
    options = ServerOptions("/m", api_key="k", server_args={"config": str(tmp_path / "own.yaml")})
    path = write_secret(options, tmp_path / "private")
    assert yaml.safe_load(Path(path).read_text()) == {"api-key": "k", "mem-fraction-static": 0.5}
    assert flags_of(server_command(options, 1, path))["--config"] == [path]


def test_no_server_restarts_once_the_run_ends(tmp_path, model_folder):
    server = SglangServer(ServerOptions(model_folder), tmp_path / "log")
    server.abandon()
    with pytest.raises(ServerError, match="the run ends"):
        server.restart()
    assert server.pid is None


@pytest.mark.parametrize(
    ("key", "server_args", "names"),
    [
        (None, {}, "environment variable RUN_KEY is not set"),
        ("  ", {}, "is not set"),
        ("-x", {}, "not start with a dash"),
        ("a b", {}, "without spaces"),
        ("ключ", {}, "ASCII"),
        ("good", {"api_key": "x"}, "api_key would be visible in recipes"),
        ("good", {"--admin-api-key": "x"}, "process lists"),
    ],
)
def test_invalid_or_exposed_api_key_is_rejected(monkeypatch, key, server_args, names):
    monkeypatch.delenv("RUN_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("RUN_KEY", key)
    (problem,) = address_problems(RolloutConfig(api_key_env="RUN_KEY", server_args=server_args))
    assert re.search(names, problem)


@pytest.mark.parametrize(("host", "words"), [("0.0.0.0", []), ("10.0.0.7", []), ("127.0.0.1", ["--api-key-env", "NO_SUCH"])])
def test_serve_rejects_a_public_host_without_an_api_key(host, words, capsys, monkeypatch):
    monkeypatch.delenv("NO_SUCH", raising=False)
    assert cli.main(["serve", "--model-path", "/m", "--host", host, *words]) == 2
    assert "api-key-env" in capsys.readouterr().err


def run_config(tmp_path, **rollout):
    config = Config()
    config.policy.path, config.run.output_dir = str(tmp_path), str(tmp_path / "run")
    for name, value in rollout.items():
        setattr(config.rollout, name, value)
    return config


@pytest.mark.parametrize(
    ("rank", "rollout", "environment", "early"),
    [
        ("0", {}, "", True),
        ("1", {}, "", False),
        ("0", {"urls": ["http://127.0.0.1:1"]}, "", False),
        ("0", {"placement": Placement.colocated}, "", False),
        ("0", {}, "calculator", False),
    ],
)
def test_servers_start_before_the_trainer_unless_they_must_wait(
    monkeypatch, tmp_path, rank, rollout, environment, early
):
    config = run_config(tmp_path, **rollout)
    config.environment.name = environment
    monkeypatch.setenv("RANK", rank)
    events = []
    monkeypatch.setattr(SglangServer, "spawn", lambda server: events.append("spawned"))
    monkeypatch.setattr(SglangServer, "wait_ready", lambda server, while_waiting: events.append("ready"))
    monkeypatch.setattr(SglangServer, "stop", lambda server, grace_s=0.0: events.append("stopped"))
    with pool.spawned_servers(config) as servers:
        assert events == ["spawned"] * early and (servers is not None) is early
        if servers is not None:
            assert pool.open_servers(config, tmp_path, events.append, load_weights=False, spawned=servers) is servers
            assert events[1].startswith("waiting for 1 SGLang server(s)") and events[2] == "ready"
    assert events[-1:] == ["stopped"] * early


def test_spawned_servers_are_stopped_when_the_trainer_fails_to_start(monkeypatch, tmp_path):
    stopped = []
    monkeypatch.setattr(SglangServer, "spawn", lambda server: None)
    monkeypatch.setattr(SglangServer, "stop", lambda server, grace_s=0.0: stopped.append(server.url))
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match="no such model"), pool.spawned_servers(run_config(tmp_path, num_servers=2)):
        raise RuntimeError("no such model")
    assert len(stopped) == 2
