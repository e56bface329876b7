"""Servers in the foreground, for a trainer that attaches to them: `megatron-rl serve`, from its arguments on."""

import argparse
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from megatron_rl.config.checks.servers import flag_problems, key_problems
from megatron_rl.config.derived import servers_are_deterministic
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import Config, RolloutConfig
from megatron_rl.config.schema.bounds import bound_problems, type_problems
from megatron_rl.errors import ConfigError, UserError
from megatron_rl.rollout.requests import ServerError
from megatron_rl.rollout.server_pool import ServerPool, server_options
from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.rollout.sglang.process.server import SglangServer
from megatron_rl.system.command_line.terminal import parse_options
from megatron_rl.system.files.atomic_files import write_atomic
from megatron_rl.system.files.hub_cache import download_hint, find_download
from megatron_rl.system.gpu.gpu_environment import count_gpus, detect_device, nccl_values
from megatron_rl.system.http.addresses import LOOPBACK, interface_of, is_loopback, local_address_for
from megatron_rl.system.http.url_files import named_urls

_FIRST_GPU = "base-gpu-id"
_LAST_PORT = 65535
_RENDEZVOUS_PORT = 100
"""Offset from the server's own port to the port of its nodes' rendezvous, which requires no key."""
_ALL_ADDRESSES = ("0.0.0.0", "::")
_POLL_S = 0.1


def serve(
    options: ServerOptions,
    num_servers: int,
    log_path: Path,
    *,
    start_timeout_s: float,
    url_file: Path | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Run ``num_servers`` servers until Ctrl-C, SIGTERM, SIGHUP or a final failure; returns an exit code for the shell.

    A server that exits is restarted, at most three times. ``log_path``: with several servers the i-th writes
    NAME-i. ``url_file`` receives their URLs, one per line, once all servers answer, and is removed when they stop.
    Must be called from the main thread, because it installs signal handlers. A SIGTERM or SIGHUP that the parent
    ignores stays ignored.
    """
    # SIGINT always: a shell ignores it in scripts that it starts in the background.
    signals = [name for name in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(name) is not signal.SIG_IGN]
    for number in (signal.SIGINT, *signals):
        signal.signal(number, signal.default_int_handler)
    name = log_path.name if num_servers == 1 else f"{log_path.stem}-{{}}{log_path.suffix}"
    if url_file is not None:
        url_file.unlink(missing_ok=True)
    try:
        with ServerPool.spawn(
            options, num_servers, log_path.parent, start_timeout_s=start_timeout_s, log_name=name
        ) as pool:
            pool.wait_ready(say)
            for server in pool.servers:
                say(f"server {server.url} is ready (model {options.model_path})")
            say(f"{num_servers} ready; logs in {log_path.parent.resolve()}; Ctrl-C stops")
            if url_file is not None:
                write_atomic(url_file, "".join(f"{url}\n" for url in pool.urls))
            _watch(pool, say)
    except KeyboardInterrupt:
        say("stopping")
        return 0
    except ServerError as error:
        say(str(error))
        return 1
    finally:
        if url_file is not None:
            url_file.unlink(missing_ok=True)


def _watch(pool: ServerPool, say: Callable[[str], None]) -> NoReturn:
    """Restart servers that exit, one at a time. Raises ServerError for a server that exits too often."""
    servers = [server for server in pool.servers if isinstance(server, SglangServer)]
    while True:
        for server in servers:
            if not server.alive():
                say(f"server {server.url} exited; its log {server.log_path} ends:\n{server.log_end()}")
                server.progress = say
                server.restart()
        time.sleep(_POLL_S)


def _check_url_file(path: Path) -> None:
    """Raise UserError for a folder or for a file that is no list of servers, because the list replaces the file."""
    try:
        problem = "it is a folder" if path.is_dir() else ""
        named_urls(path)
    except UserError as error:
        problem = f"it would replace a file that is no list of servers ({error})"
    if problem:
        raise UserError(f"--url-file {path}: {problem}; give another file")


def resolve_servers(arguments: argparse.Namespace) -> tuple[ServerOptions, int]:
    """Returns (options of the first server, number of servers). Raises UserError."""
    host = _own_address(arguments.trainer) if arguments.trainer else arguments.host
    if arguments.url_file and host in _ALL_ADDRESSES:
        raise UserError(f"--url-file: {host} is not an address that a trainer can use; give --trainer NODE, or --host with one of them")
    if arguments.url_file:
        _check_url_file(arguments.url_file)
    if not arguments.config:  # fail early, before the libraries are loaded
        _api_key(arguments.api_key_env, host, without=arguments.without_api_key)
    device = detect_device()
    options, default_number, key_name = _of_recipe(arguments) if arguments.config else _of_model(arguments, device)
    api_key = _api_key(key_name, host, without=arguments.without_api_key)
    size, first_gpu = options.tensor_parallel_size, options.server_args.get(_FIRST_GPU, 0)
    if not isinstance(first_gpu, int):
        raise UserError(f"{_FIRST_GPU}={first_gpu}: expected the index of the first server's first GPU")
    spread = _over_nodes(arguments, size)
    here = size // arguments.num_nodes
    free_gpus = count_gpus() - first_gpu
    number = arguments.num_servers or (free_gpus // here if arguments.config and free_gpus > 0 else default_number)
    # One command starts one node's part of the server.
    number = 1 if spread else number
    if device == "cuda" and not 0 < number * here <= free_gpus:
        raise UserError(
            f"{max(number, 1)} servers x {here} GPUs are more than the {free_gpus} of this node from GPU {first_gpu} on; lower "
            "--num-servers or the tensor-parallel size, or spread one server over several nodes (--num-nodes)"
        )
    if not 0 <= arguments.port <= _LAST_PORT - number:
        raise UserError(f"--port {arguments.port}: expected 0 (any free ports) or a port up to {_LAST_PORT - number}")
    server_args = {name: value for name, value in options.server_args.items() if name != _FIRST_GPU}
    if problems := list(
        flag_problems(server_args, num_servers=number, dtype=options.dtype, key="", loads_weights=options.load_weights)
    ):
        raise ConfigError("\n".join(problems))
    # gloo would use the address of the host name, which many Linux systems map to 127.0.1.1.
    interface = "" if is_loopback(host) or "GLOO_SOCKET_IFNAME" in os.environ else interface_of(host)
    options = replace(
        options,
        host=host,
        port=arguments.port,
        first_gpu=first_gpu,
        api_key=api_key,
        server_args=server_args | spread,
        env={"GLOO_SOCKET_IFNAME": interface} if interface else {},
    )
    return options, number


def _over_nodes(arguments: argparse.Namespace, size: int) -> dict[str, Any]:
    """SGLang's options of one server over several nodes with ``size`` GPUs in total; empty on one node. Raises UserError."""
    number, rank, first = arguments.num_nodes, arguments.node_rank, arguments.first_node
    if number == 1:
        if rank or first:
            raise UserError("--node-rank and --first-node are for one server over several nodes; add --num-nodes")
        return {}
    problem = ""
    if not 0 <= rank < number:
        problem = f"--node-rank {rank}: expected 0 to {number - 1} with --num-nodes {number}"
    elif not first:
        problem = "--num-nodes: set --first-node NODE on every node, the one with --node-rank 0"
    elif size % number:
        problem = f"{size} GPUs cannot be divided evenly over {number} nodes; set a tensor-parallel size that {number} divides"
    elif (arguments.num_servers or 1) > 1:
        problem = f"--num-servers {arguments.num_servers}: with --num-nodes a command is one node's part of one server; start each alone"
    elif arguments.port == 0 or arguments.port + _RENDEZVOUS_PORT > _LAST_PORT:
        problem = f"--port {arguments.port}: all nodes of a server need the same port, from 1 to {_LAST_PORT - _RENDEZVOUS_PORT}"
    elif arguments.url_file and rank:
        problem = "--url-file: only the first node has an address for requests; remove it on the others"
    if problem:
        raise UserError(problem)
    return {"nnodes": number, "node-rank": rank, "dist-init-addr": f"{first}:{arguments.port + _RENDEZVOUS_PORT}"}


def _of_model(arguments: argparse.Namespace, device: str) -> tuple[ServerOptions, int, str]:
    options = ServerOptions(
        model_path=find_download(arguments.model_path, "model"),
        dtype=arguments.dtype or "float32",
        tensor_parallel_size=arguments.tensor_parallel_size or 1,
        deterministic=servers_are_deterministic(RolloutConfig(deterministic=arguments.deterministic), device),
        tokenizer=True,
        device=device,
        nccl=nccl_values(os.environ),
        server_args=_named(parse_options(arguments.words)),
    )
    return options, 1, arguments.api_key_env


def _of_recipe(arguments: argparse.Namespace) -> tuple[ServerOptions, int, str]:
    config = load_config(arguments.config, _recipe_overrides(arguments))
    _check_servers(config)
    options = server_options(config, load_weights=False, tokenizer=True)
    options = replace(options, server_args=_named(options.server_args))
    return options, config.rollout.num_servers, config.rollout.api_key_env


def _recipe_overrides(arguments: argparse.Namespace) -> Sequence[str]:
    given = {
        "policy.dtype": arguments.dtype,
        "rollout.tensor_parallel_size": arguments.tensor_parallel_size,
        "rollout.deterministic": arguments.deterministic,
        "rollout.api_key_env": arguments.api_key_env or None,
    }
    return [*arguments.words, *(f"{key}={value}" for key, value in given.items() if value is not None)]


def _check_servers(config: Config) -> None:
    """Check the keys that a server needs; the trainer checks the rest of the recipe."""
    problems = list(type_problems(config)) or [*bound_problems("rollout", config.rollout), *key_problems(config.rollout)]
    if not (Path(config.policy.path) / "config.json").is_file():
        hint = download_hint(config.policy.path, "model")
        problems.append(f"policy.path: {config.policy.path or 'nothing'} is not a Hugging Face model folder with a config.json{hint}")
    if problems:
        raise ConfigError("\n".join(problems))


def _named(server_args: Any) -> dict[str, Any]:
    return {name.lstrip("-").replace("_", "-"): value for name, value in server_args.items()}


def _own_address(trainer: str) -> str:
    try:
        return local_address_for(trainer)
    except OSError as error:
        raise UserError(f"--trainer {trainer}: {error}; expected the name or address of the driver's node") from error


def _api_key(name: str, host: str, *, without: bool) -> str:
    """The API key in the variable ``name``. Raises UserError if a required key is missing or cannot be sent in a header."""
    key = os.environ.get(name, "").strip() if name else ""
    if name and not key:
        raise UserError(f"--api-key-env {name}: this environment variable is not set; export it with the key")
    if key.startswith("-") or not (key.isascii() and key.isprintable()) or " " in key:
        raise UserError(f"--api-key-env {name}: the key must be ASCII without spaces, and not start with a dash")
    if not key and host not in LOOPBACK and not without:
        raise UserError(
            f"--host {host}: any process that reaches this server could change its weights. Export a key (openssl rand -hex "
            "32) on this node and the trainer's, and name its variable: --api-key-env here, rollout.api_key_env there. "
            "In a network that only this job can use, give --without-api-key"
        )
    return key
