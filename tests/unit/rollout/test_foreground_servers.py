"""Laws of `megatron-rl serve`: the servers that arguments and recipes define; no server starts."""

import argparse
import signal
from pathlib import Path

import pytest

from megatron_rl import cli
from megatron_rl.commands import serve as command
from megatron_rl.errors import UserError
from megatron_rl.rollout import foreground_servers
from megatron_rl.rollout.foreground_servers import resolve_servers
from megatron_rl.rollout.requests import ServerError
from megatron_rl.rollout.sglang.process.options import ServerOptions, server_command
from megatron_rl.rollout.sglang.process.server import SglangServer


def options(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return resolve_servers(parser.parse_args(words))


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(foreground_servers, "count_gpus", lambda: 8)
    monkeypatch.setattr(foreground_servers, "detect_device", lambda: "cuda")
    monkeypatch.setattr("megatron_rl.rollout.server_pool.detect_device", lambda: "cuda")


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"policy: {{path: {tmp_path}, dtype: bfloat16}}\n"
        "rollout: {num_servers: 3, tensor_parallel_size: 2, server_args: {mem-fraction-static: 0.7}}\n"
    )
    return str(path)


def test_model_path_gives_one_server_without_determinism_on_gpus(gpus):
    found, number = options("--model-path", "/m", "--dtype", "bfloat16")
    assert number == 1 and found.load_weights and not found.deterministic and found.port == 30000
    assert options("--model-path", "/m", "--deterministic")[0].deterministic
    assert not options("--model-path", "/m", "--no-deterministic")[0].deterministic


def test_servers_on_cpu_honor_seeds_by_default():
    assert options("--model-path", "/m")[0].deterministic


def test_recipe_gives_the_servers_of_its_run_on_all_gpus(gpus, recipe):
    found, number = options("--config", recipe, "rollout.server_args.chunked-prefill-size=512")
    assert number == 4 and found.tensor_parallel_size == 2 and found.dtype == "bfloat16"
    assert found.server_args == {"mem-fraction-static": 0.7, "chunked-prefill-size": 512}
    assert not found.load_weights, "the trainer sends its own"
    found, number = options("--num-servers", "2", "--tensor-parallel-size", "1", "--config", recipe)
    assert number == 2 and found.tensor_parallel_size == 1


def test_recipe_sets_the_number_of_servers_without_gpus(recipe):
    assert options("--config", recipe)[1] == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_one_server_may_span_several_nodes(gpus, recipe, rank):
    words = ["--num-nodes", "2", "--node-rank", str(rank), "--first-node", "n3", "rollout.tensor_parallel_size=16"]
    found, number = options("--config", recipe, *words)
    assert number == 1 and found.tensor_parallel_size == 16
    flags = server_command(found, 30000)
    for flag, value in {"--nnodes": "2", "--node-rank": str(rank), "--dist-init-addr": "n3:30100", "--port": "30000"}.items():
        assert flags[flags.index(flag) + 1] == value


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--node-rank", "1"], "add --num-nodes"),
        (["--num-nodes", "2"], "--first-node NODE"),
        (["--num-nodes", "2", "--first-node", "n", "--node-rank", "2"], "expected 0 to 1"),
        (["--num-nodes", "3", "--first-node", "n", "--tensor-parallel-size", "16"], "16 GPUs cannot be divided evenly over 3 nodes"),
        (["--num-nodes", "2", "--first-node", "n", "--num-servers", "2", "--tensor-parallel-size", "16"], "start each alone"),
        (["--num-nodes", "2", "--first-node", "n", "--port", "0", "--tensor-parallel-size", "16"], "the same port"),
        (["--num-nodes", "2", "--first-node", "n", "--node-rank", "1", "--url-file", "u", "--tensor-parallel-size=16"], "the first node"),
        (["--num-nodes", "2", "--first-node", "n", "--tensor-parallel-size", "32"], "16 GPUs are more than the 8"),
    ],
)
def test_impossible_servers_over_nodes_are_rejected(gpus, words, names):
    with pytest.raises(UserError, match=names):
        options("--model-path", "/m", *words)


def test_speculative_decoding_is_rejected_only_with_a_trainer(gpus, recipe):
    assert options("--model-path", "/m", "speculative-algorithm=NEXTN")[0].server_args
    with pytest.raises(UserError, match="random draft"):
        options("--config", recipe, "rollout.server_args.speculative-algorithm=NEXTN")


def test_servers_get_consecutive_gpus_and_ports(gpus, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(SglangServer, "spawn", lambda server: started.append(server))
    found, number = options("--model-path", "/m", "--num-servers", "3", "--tensor-parallel-size", "2", "base-gpu-id=2")
    foreground_servers.ServerPool.spawn(found, number, tmp_path)
    flags = [server_command(server.options, server.port) for server in started]
    assert [words[words.index("--base-gpu-id") + 1] for words in flags] == ["2", "4", "6"]
    assert [server.port for server in started] == [30000, 30001, 30002]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--num-servers", "5", "--tensor-parallel-size", "2"], "5 servers x 2 GPUs are more than the 8"),
        (["--num-servers", "8", "base-gpu-id=1"], "more than the 7 of this node from GPU 1 on"),
        (["tensor-parallel-size=2"], "--tensor-parallel-size"),
        (["dp-size=8"], "--num-servers"),
        (["pp_size=2"], "cannot receive weights"),
        (["--port", "65535", "--num-servers", "2"], "--port 65535: expected 0 .* or a port up to 65533"),
        (["--host", "0.0.0.0", "--url-file", "urls", "--without-api-key"], "0.0.0.0 is not an address that a trainer can use"),
        (["base-gpu-id=x"], "base-gpu-id=x: expected the index"),
        (["--trainer", "no.such.host.invalid"], "--trainer no.such.host.invalid: .*expected the name or address"),
    ],
)
def test_serve_rejects_bad_arguments_before_anything_starts(gpus, words, names):
    with pytest.raises(UserError, match=names):
        options("--model-path", "/m", *words)


def test_serve_rejects_a_recipe_without_a_model(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("rollout: {tensor_parallel_size: 0}\n")
    with pytest.raises(UserError, match=r"tensor_parallel_size(.|\n)*policy.path: nothing is not a Hugging Face model folder"):
        options("--config", str(path))


def test_trainer_option_selects_the_reachable_address_and_interface(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("RUN_KEY", "k")
    monkeypatch.setattr(foreground_servers, "local_address_for", lambda host: {"node0": "10.0.0.7"}[host])
    monkeypatch.setattr(foreground_servers, "interface_of", lambda address: {"10.0.0.7": "eth1"}[address])
    found, _ = options("--model-path", "/m", "--trainer", "node0", "--api-key-env", "RUN_KEY")
    assert found.host == "10.0.0.7" and found.env == {"GLOO_SOCKET_IFNAME": "eth1"} and found.api_key == "k"
    with pytest.raises(UserError, match="--api-key-env here, rollout.api_key_env there"):
        options("--model-path", "/m", "--trainer", "node0")


def test_servers_use_the_api_key_of_the_recipe(recipe, monkeypatch):
    monkeypatch.setenv("RUN_KEY", "secret")
    assert options("--config", recipe, "rollout.api_key_env=RUN_KEY")[0].api_key == "secret"
    monkeypatch.delenv("RUN_KEY")
    with pytest.raises(UserError, match="RUN_KEY is not set"):
        options("--config", recipe, "rollout.api_key_env=RUN_KEY")


def test_serve_requires_a_model_or_a_recipe(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve"])
    assert "--model-path --config" in capsys.readouterr().err


class Played:
    """Servers without processes: ``deaths`` are the polls at which the first server has exited."""

    def __init__(self, monkeypatch, deaths=()):
        self.looks, self.restarted, self.stopped, self.timeouts = 0, [], [], set()
        monkeypatch.setattr(SglangServer, "spawn", lambda server: self.timeouts.add(server.start_timeout_s))
        monkeypatch.setattr(SglangServer, "wait_ready", lambda server, while_waiting: None)
        monkeypatch.setattr(SglangServer, "stop", lambda server, grace_s=0.0: self.stopped.append(server.port))
        monkeypatch.setattr(SglangServer, "restart", lambda server: self.restarted.append(server.port))
        monkeypatch.setattr(SglangServer, "alive", self.alive)
        monkeypatch.setattr(foreground_servers, "_POLL_S", 0.0)
        self.deaths = deaths

    def alive(self, *ignored):
        self.looks += 1
        if self.looks > 6:
            raise KeyboardInterrupt
        return self.looks not in self.deaths


@pytest.fixture
def signals():
    """Restore the signal handlers after ``serve`` has installed its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_exited_servers_restart_and_the_url_file_stays(monkeypatch, tmp_path, signals):
    played, said = Played(monkeypatch, deaths=(3, 4)), []
    urls = tmp_path / "new" / "urls"
    monkeypatch.setattr(SglangServer, "restart", lambda server: played.restarted.append((server.port, urls.read_text())))
    status = foreground_servers.serve(
        ServerOptions("/m", port=7), 2, tmp_path / "sglang.log", start_timeout_s=9.0, url_file=urls, say=said.append
    )
    both = "http://127.0.0.1:7\nhttp://127.0.0.1:8\n"
    assert status == 0 and played.restarted == [(7, both), (8, both)] and not urls.exists()
    assert played.timeouts == {9.0} and set(played.stopped) == {7, 8} and said[-1] == "stopping"


def test_server_that_cannot_start_ends_the_others_with_status_1(monkeypatch, tmp_path, signals):
    played = Played(monkeypatch, deaths=(1,))

    def give_up(server):
        raise ServerError("died again")

    monkeypatch.setattr(SglangServer, "restart", give_up)
    said = []
    assert foreground_servers.serve(ServerOptions("/m", port=7), 2, tmp_path / "log", start_timeout_s=9.0, say=said.append) == 1
    assert said[-1] == "died again" and set(played.stopped) == {7, 8}


def test_signals_ignored_by_the_parent_stay_ignored_except_ctrl_c(monkeypatch, tmp_path, signals):
    Played(monkeypatch)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.default_int_handler)  # under nohup the tests' own parent ignores it
    foreground_servers.serve(ServerOptions("/m", port=7), 1, tmp_path / "log", start_timeout_s=9.0, say=lambda text: None)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler is signal.getsignal(signal.SIGHUP)


def test_a_url_file_that_is_no_list_of_servers_is_refused_and_stays(recipe, tmp_path):
    urls = tmp_path / "servers.urls"
    for content in ("", "http://127.0.0.1:1\n"):
        urls.write_text(content)
        options("--model-path", "/m", "--url-file", str(urls))
    for path, words in ((recipe, "would replace a file that is no list of servers"), (str(tmp_path), "it is a folder")):
        with pytest.raises(UserError, match=f"--url-file .*{words}.*; give another file"):
            options("--model-path", "/m", "--url-file", path)
    assert Path(recipe).read_text().startswith("policy:")
