"""Servers of a run: started by this process (managed) or attached by URL.

Callers that keep state inside a server (weight sync: its process group and the current weights) remember the
server's ``incarnation`` and set that state up again once the number has changed. Only managed servers are ever
stopped.
"""

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.config.derived import (
    WeightMethod,
    key_in,
    policy_model,
    sends_adapters,
    servers_are_deterministic,
    shares_devices,
    uses_attached_servers,
    weight_method,
)
from megatron_rl.config.schema import Config, Dtype, RolloutConfig
from megatron_rl.errors import ModelError
from megatron_rl.families.adapters import adapted_linears
from megatron_rl.families.model_facts import as_config, read_model_json
from megatron_rl.rollout.requests import ServerError
from megatron_rl.rollout.sglang.process.attached_server import (
    AttachedServer,
    disagreements,
    discovery_source,
    model_differences,
    nccl_of,
)
from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.rollout.sglang.process.server import Progress, SglangServer
from megatron_rl.rollout.sglang.wire.response_validation import returns_routes
from megatron_rl.system.gpu.gpu_environment import NCCL_DEFAULTS, count_gpus, detect_device, nccl_values
from megatron_rl.system.http.url_files import named_urls
from megatron_rl.system.processes.host_memory import num_ranks_here

logger = logging.getLogger(__name__)

_ADAPTERS_PER_BATCH = 2
"""The adapter of all requests; SGLang counts the model without adapters too."""
_POLL_S = 1.0


Server = SglangServer | AttachedServer


class ServerPool:
    """Servers of a run, in the order in which they were added. A context manager that stops managed servers."""

    def __init__(self, servers: Sequence[Server], *, api_key: str = "") -> None:
        """``api_key``: key that requests to any of the servers carry."""
        if not servers:
            raise ValueError("a pool has at least one server")
        self.servers = tuple(servers)
        self.api_key = api_key
        self.remarks: tuple[tuple[str, str], ...] = ()
        """(difference in precision between an attached server and the trainer, remedy) of each such server."""
        self.named_by = ""
        """File, folder or router that lists the servers and is polled for changes (``named_urls``); empty if the
        servers are fixed."""

    @classmethod
    def start(
        cls,
        options: ServerOptions,
        num_servers: int,
        log_dir: str | Path,
        *,
        start_timeout_s: float = 300.0,
        max_restarts: int = 3,
        progress: Progress = logger.info,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> "ServerPool":
        """Run ``spawn`` and ``wait_ready``. Raises ServerError, with no server left running, if a server does not
        start."""
        pool = cls.spawn(options, num_servers, log_dir, start_timeout_s=start_timeout_s, max_restarts=max_restarts)
        pool.wait_ready(progress, while_waiting)
        return pool

    @classmethod
    def spawn(
        cls,
        options: ServerOptions,
        num_servers: int,
        log_dir: str | Path,
        *,
        start_timeout_s: float = 300.0,
        max_restarts: int = 3,
        log_name: str = "sglang-{}.log",
    ) -> "ServerPool":
        """Start the processes of ``num_servers`` equal servers, on ports from ``options.port`` up (0: any free ports).

        On GPUs each server takes the next ``options.tensor_parallel_size`` GPUs from ``options.first_gpu`` up. The
        servers load their models at the same time; ``wait_ready`` must follow. ``log_name``: file name in
        ``log_dir``, formatted with the server's index.
        """
        servers = [
            SglangServer(
                replace(
                    options,
                    port=options.port + i if options.port else 0,
                    first_gpu=options.first_gpu + i * options.tensor_parallel_size,
                ),
                Path(log_dir) / log_name.format(i),
                start_timeout_s=start_timeout_s,
                max_restarts=max_restarts,
            )
            for i in range(num_servers)
        ]
        pool = cls(servers, api_key=options.api_key)
        with pool._stopped_on_failure():
            for server in servers:
                server.spawn()
        return pool

    def wait_ready(self, progress: Progress = logger.info, while_waiting: Callable[[], None] = lambda: None) -> None:
        """Wait until all spawned servers answer. Raises ServerError, with no server left running, if a server does not."""
        with self._stopped_on_failure():
            for server in self.servers:
                if isinstance(server, SglangServer):
                    server.progress = progress
                    server.wait_ready(while_waiting)

    @contextmanager
    def _stopped_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for server in self.servers:
                server.stop(grace_s=0.0)
            raise

    @classmethod
    def attach(
        cls, urls: Sequence[str], *, timeout_s: float = 300.0, api_key: str = "", progress: Progress = logger.info
    ) -> "ServerPool":
        """Attach to running servers. Raises ServerError for a URL where no SGLang server answers."""
        if len(set(urls)) != len(urls):
            raise ValueError(f"rollout.urls names a server twice: {list(urls)}")
        servers = [AttachedServer(url, timeout_s=timeout_s, api_key=api_key, progress=progress) for url in urls]
        # One at a time through ``add``, which finds a server that is listed under two addresses.
        pool = cls(servers[:1], api_key=api_key)
        for server in servers[1:]:
            pool.add(server)
        for server in servers:
            server.model_info()
        return pool

    def add(self, server: Server) -> None:
        """Add a server. Raises ServerError if the pool has it under another address: weight sync would wait for it
        twice."""
        if same := next((one.url for one in self.servers if isinstance(server, AttachedServer) and server.is_same(one)), ""):
            raise ServerError(f"{server.url} is the server at {same} under another address; list each server once")
        # A new tuple, because another thread may be iterating over the old one.
        self.servers = (*self.servers, server)

    def remove(self, url: str) -> None:
        self.servers = tuple(server for server in self.servers if server.url != url)

    def at(self, url: str) -> Server:
        """Server with the given URL."""
        return next(server for server in self.servers if server.url == url)

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    def abandon_restarts(self) -> None:
        """End restarts in progress and allow no more, because the run ends."""
        for server in self.servers:
            server.abandon()

    def stop(self) -> None:
        """Stop all managed servers without a grace period: they have no state to save, and a clean exit takes seconds."""
        self.abandon_restarts()
        for server in self.servers:
            server.stop(grace_s=0.0)

    def __enter__(self) -> "ServerPool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def first_free_gpu(rollout: RolloutConfig, note: Progress) -> int:
    """First GPU after the GPUs of the trainer's ranks on this node; 0 if there are too few GPUs for both.

    Too few GPUs is only possible if weights travel by files (config/checks/servers.py).
    """
    num_gpus, num_ranks = count_gpus(), num_ranks_here()
    needed = rollout.num_servers * rollout.tensor_parallel_size
    if num_gpus >= num_ranks + needed:
        return num_ranks
    if num_gpus:
        note(
            f"{num_gpus} GPUs are fewer than {num_ranks} trainer ranks and {needed} server workers need: they share them "
            "from the first GPU on (rollout.placement=colocated time-shares the devices)"
        )
    return 0


@contextmanager
def spawned_servers(config: Config) -> Iterator[ServerPool | None]:
    """Spawn a run's servers on rank 0 before the trainer loads its libraries and models; ``open_servers`` takes them.

    Yields None if the servers cannot be started yet: a dialogue or a hot token decides their options, or they share
    devices.
    """
    rollout = config.rollout
    # Their options depend on the tokenizer and the environment, which are loaded later.
    waits = bool(uses_attached_servers(rollout) or config.environment.name or rollout.fire.after)
    if waits or os.environ.get("RANK", "0") != "0" or shares_devices(rollout):
        yield None
        return
    notes: list[str] = []
    first_gpu = first_free_gpu(rollout, notes.append)
    options = server_options(config, load_weights=False, tokenizer=False, first_gpu=first_gpu)
    if notes:  # too few GPUs
        yield None
        return
    log_dir = Path(config.run.output_dir) / "logs"
    with ServerPool.spawn(options, rollout.num_servers, log_dir, **_start_limits(rollout)) as servers:
        yield servers


def open_servers(
    config: Config,
    log_dir: Path,
    note: Progress,
    *,
    load_weights: bool,
    tokenizer: bool = False,
    while_waiting: Callable[[], None] = lambda: None,
    spawned: ServerPool | None = None,
) -> ServerPool:
    """Start or attach to the servers of a configuration. Closing the pool leaves attached servers running.

    ``load_weights``, ``tokenizer``: as in ServerOptions. ``spawned``: pool from ``spawned_servers``, which is only
    waited for. Raises ServerError if a server does not start or answer.
    """
    rollout = config.rollout
    if spawned is not None:
        note(f"waiting for {rollout.num_servers} SGLang server(s), started before the trainer; logs in {log_dir}")
        spawned.wait_ready(note, while_waiting)
        return spawned
    api_key = key_in(rollout.api_key_env)
    if uses_attached_servers(rollout):
        named_by = discovery_source(rollout.urls, rollout.urls_file, api_key)
        if named_by and shares_devices(rollout):
            raise ServerError(f"rollout.urls: {named_by} is a router; colocated servers must be listed in the order of the ranks")
        urls = _awaited_urls(named_by, rollout.start_timeout_s, api_key, while_waiting) if named_by else rollout.urls
        note(f"attaching to {len(urls)} SGLang servers{f', listed by {named_by}' * bool(named_by)}: {', '.join(urls)}")
        pool = ServerPool.attach(urls, timeout_s=rollout.start_timeout_s, api_key=api_key, progress=note)
        pool.named_by = named_by
        attached = [server for server in pool.servers if isinstance(server, AttachedServer)]
        infos = {server.url: server.server_info() for server in attached}
        _check_attached(infos, config, note, has_trainer=not load_weights)
        # A run killed during a publish leaves its servers paused. Without a trainer, another run may be publishing to them now.
        for server in attached if not (load_weights or shares_devices(rollout)) else ():
            server.go_on()
        pool.remarks = tuple(_precision_remarks(infos, config.policy.dtype.value))
        for remark in pool.remarks:
            note("; ".join(remark))
        return pool
    note(f"starting {rollout.num_servers} SGLang server(s); logs in {log_dir}")
    # Servers that load their own weights serve a command without a trainer, so they may use all GPUs.
    shared = load_weights or shares_devices(rollout)
    first_gpu = 0 if shared else first_free_gpu(rollout, note)
    options = server_options(config, load_weights=load_weights, tokenizer=tokenizer, first_gpu=first_gpu)
    return ServerPool.start(
        options,
        rollout.num_servers,
        log_dir,
        **_start_limits(rollout),
        progress=note,
        while_waiting=while_waiting,
    )


def _awaited_urls(named_by: str, timeout_s: float, api_key: str, while_waiting: Callable[[], None]) -> list[str]:
    deadline_s = time.monotonic() + timeout_s
    while True:
        problem = ""
        try:
            if urls := named_urls(named_by, api_key):
                return urls
        except OSError as error:  # the router may still be starting
            problem = f" ({error})"
        if time.monotonic() > deadline_s:
            raise ServerError(
                f"{named_by} listed no server within {timeout_s:.0f} s (rollout.start_timeout_s){problem}; expected a router, or a URL per "
                "line, in a file, in files *.urls of a folder (megatron-rl serve --url-file writes them) or at an address"
            )
        while_waiting()
        time.sleep(_POLL_S)


def attach_one(url: str, config: Config, note: Progress) -> AttachedServer:
    """Attach a server that joins a running training. Raises ServerError for a server that the run cannot use."""
    pool = ServerPool.attach(
        [url], timeout_s=config.rollout.start_timeout_s, api_key=key_in(config.rollout.api_key_env), progress=note
    )
    (server,) = (one for one in pool.servers if isinstance(one, AttachedServer))
    _check_attached({url: server.server_info()}, config, note, has_trainer=True)
    server.go_on()
    return server


def _precision_remarks(infos: Mapping[str, Mapping[str, Any]], dtype: str) -> Iterator[tuple[str, str]]:
    """Yield ``ServerPool.remarks``; ``infos`` maps URL to the server's options."""
    for url, info in infos.items():
        served = info.get("dtype")
        if served not in (None, "auto", dtype):
            found = f"server {url} computes in {served}, the trainer in policy.dtype={dtype}"
            yield found, f"start it with --dtype {dtype}"
        elif dtype != Dtype.float32.value and info.get("enable_fp32_lm_head") is False:
            found = f"server {url} rounds logits to {dtype}, the trainer does not"
            yield found, "start it with --enable-fp32-lm-head (megatron-rl serve does)"


def _served_model(info: Mapping[str, Any]) -> dict[str, Any]:
    """Model configuration in the server's model folder; empty if that folder exists only on the server's node."""
    try:
        return read_model_json(str(info.get("model_path", "")))
    except (ModelError, OSError):
        return {}


def _check_attached(infos: Mapping[str, Mapping[str, Any]], config: Config, note: Progress, *, has_trainer: bool) -> None:
    """Check attached servers. Raises ServerError for servers that this run cannot use."""
    ours = server_options(config, load_weights=not has_trainer, tokenizer=False)
    broadcasts = has_trainer and weight_method(config.rollout) is WeightMethod.broadcast
    problems, unreported = [], []
    model = policy_model(config)
    for url, info in infos.items():
        differences = [*disagreements(info, ours, broadcasts=broadcasts, model_type=model.get("model_type"))]
        if has_trainer and (differing := model_differences(_served_model(info), model)):
            differences.append(f"it has another model, {info['model_path']}: {differing}; start it with --model-path {config.policy.path}")
        if url in [own.rstrip("/") for own in config.eval.urls]:
            differences.append("it is in eval.urls too; a server has one model at a time, so remove it from one of the two lists")
        problems += [f"server {url}: {problem}" for problem in differences]
        unreported += [url] if nccl_of(info).keys() != ours.nccl.keys() else []
    if problems:
        raise ServerError("\n".join(problems))
    if broadcasts and unreported and ours.device != "cpu" and ours.nccl != NCCL_DEFAULTS:
        values = " ".join(f"{name}={value}" for name, value in ours.nccl.items())
        note(f"{', '.join(unreported)} do not report their NCCL variables: start them with {values}, like the trainer")


def server_options(config: Config, *, load_weights: bool, tokenizer: bool, first_gpu: int = 0) -> ServerOptions:
    """Options of the run's first server; the other servers differ in port and GPUs."""
    rollout, device = config.rollout, detect_device()
    return ServerOptions(
        model_path=config.policy.path,
        host=rollout.host,
        port=rollout.port,
        dtype=config.policy.dtype.value,
        tensor_parallel_size=rollout.tensor_parallel_size,
        deterministic=servers_are_deterministic(rollout, device),
        load_weights=load_weights,
        tokenizer=tokenizer,
        device=device,
        first_gpu=first_gpu,
        can_sleep=shares_devices(rollout),
        returns_routes=returns_routes(config),
        api_key=key_in(rollout.api_key_env) or secrets.token_hex(32),
        nccl=nccl_values(os.environ),
        server_args={**_adapter_args(config, device), **rollout.server_args},
    )


def _adapter_args(config: Config, device: str) -> dict[str, Any]:
    """SGLang's options for servers that get the policy's adapters."""
    if not sends_adapters(config):
        return {}
    model = as_config(policy_model(config))
    linears = adapted_linears(model, config.policy.lora.targets, config.policy.lora.rank)
    return {
        "enable-lora": True,
        "max-lora-rank": config.policy.lora.rank,
        "lora-target-modules": sorted({module.rpartition(".")[2] for linear in linears for module in linear.modules}),
        "max-loras-per-batch": _ADAPTERS_PER_BATCH,
        **({"lora-backend": "torch_native"} if device == "cpu" else {}),
    }


def _start_limits(rollout: RolloutConfig) -> dict[str, Any]:
    return {"start_timeout_s": rollout.start_timeout_s, "max_restarts": rollout.max_restarts}
