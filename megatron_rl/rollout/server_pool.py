"""The servers of a run: started here, or attached to by URL.

Whoever keeps state inside a server (weight sync: its process group and the current weights) remembers the server's
``incarnation`` and sets that state up again once the number has changed. Only servers started here are ever stopped.
"""

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from megatron_rl.config.derived import server_placement
from megatron_rl.config.schema import Config, RolloutConfig
from megatron_rl.rollout.sglang.attached import AttachedServer
from megatron_rl.rollout.sglang.options import ServerOptions
from megatron_rl.rollout.sglang.routes import returns_routes
from megatron_rl.rollout.sglang.server import Progress, SglangServer, count_gpus, detect_device

logger = logging.getLogger(__name__)


class Server(Protocol):
    incarnation: int
    is_ours: bool
    """Started here, so that it can be started again."""
    num_restarts: int
    """In this run, also before it was interrupted."""

    @property
    def url(self) -> str: ...

    def healthy(self, timeout_s: float = 5.0) -> bool: ...

    def restart(self, while_waiting: Callable[[], None] = ...) -> None: ...

    def abandon(self) -> None: ...

    def stop(self, grace_s: float = ...) -> None: ...


class ServerPool:
    """The servers of a run, in a fixed order. A context manager that stops those it started."""

    def __init__(self, servers: Sequence[Server], *, api_key: str = "") -> None:
        """``api_key``: that requests to any of them carry."""
        if not servers:
            raise ValueError("a pool has at least one server")
        self.servers = tuple(servers)
        self.api_key = api_key

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
        """Start ``num_servers`` equal servers at the same time, on ports from ``options.port`` up (0: any free ones).

        On GPUs each takes the next ``options.tensor_parallel_size`` ones from ``options.first_gpu`` up. Raises
        ServerError, with none left running, if one of them does not come up.
        """
        servers = [
            SglangServer(
                replace(
                    options,
                    port=options.port + i if options.port else 0,
                    first_gpu=options.first_gpu + i * options.tensor_parallel_size,
                ),
                Path(log_dir) / f"sglang-{i}.log",
                start_timeout_s=start_timeout_s,
                max_restarts=max_restarts,
                progress=progress,
            )
            for i in range(num_servers)
        ]
        pool = cls(servers, api_key=options.api_key)
        try:
            # All processes first, then the waiting: they load their models at the same time.
            for server in servers:
                server.spawn()
            for server in servers:
                server.wait_ready(while_waiting)
        except BaseException:
            for server in servers:
                server.stop(grace_s=0.0)
            raise
        return pool

    @classmethod
    def attach(
        cls, urls: Sequence[str], *, timeout_s: float = 300.0, api_key: str = "", progress: Progress = logger.info
    ) -> "ServerPool":
        """Attach to running servers. Raises ServerError if one does not answer as an SGLang server."""
        if len(set(urls)) != len(urls):
            raise ValueError(f"rollout.urls names a server twice: {list(urls)}")
        servers = [AttachedServer(url, timeout_s=timeout_s, api_key=api_key, progress=progress) for url in urls]
        for server in servers:
            server.model_info()
        return cls(servers, api_key=api_key)

    def at(self, url: str) -> Server:
        """The server with one of ``urls``."""
        return next(server for server in self.servers if server.url == url)

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    def abandon_restarts(self) -> None:
        """The run ends: restarts in progress end too, and no other begins."""
        for server in self.servers:
            server.abandon()

    def stop(self) -> None:
        """Without grace: a server holds nothing that the run does not have, and its own way out takes seconds."""
        self.abandon_restarts()
        for server in self.servers:
            server.stop(grace_s=0.0)

    def __enter__(self) -> "ServerPool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def _first_free_gpu(rollout: RolloutConfig, note: Progress) -> int:
    """The first GPU behind those of the trainer's ranks on this machine; 0 where there are too few for both."""
    num_gpus, num_ranks = count_gpus(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    needed = rollout.num_servers * rollout.tensor_parallel_size
    if num_gpus >= num_ranks + needed:
        return num_ranks
    if num_gpus:
        note(
            f"{num_gpus} GPUs are fewer than {num_ranks} trainer ranks and {needed} server workers need: they share them "
            "from the first one on (rollout.placement=colocated lets them take turns)"
        )
    return 0


def open_servers(
    config: Config,
    log_dir: Path,
    note: Progress,
    *,
    load_weights: bool,
    tokenizer: bool = False,
    while_waiting: Callable[[], None] = lambda: None,
) -> ServerPool:
    """The servers that a configuration asks for, started here or attached to; stopping leaves attached ones alone.

    ``load_weights``, ``tokenizer``: as in ServerOptions. Raises ServerError when one does not come up or answer.
    """
    rollout = config.rollout
    shares_devices = server_placement(rollout).shares_devices
    api_key = os.environ[rollout.api_key_env].strip() if rollout.api_key_env else ""
    if rollout.urls:
        note(f"attaching to {len(rollout.urls)} SGLang servers: {', '.join(rollout.urls)}")
        if config.policy.fp32_head:
            note("policy.fp32_head: attached servers compute such a head only if started with --enable-fp32-lm-head")
        return ServerPool.attach(rollout.urls, timeout_s=rollout.start_timeout_s, api_key=api_key, progress=note)
    note(f"starting {rollout.num_servers} SGLang server(s); logs in {log_dir}")
    options = ServerOptions(
        model_path=config.policy.path,
        host=rollout.host,
        port=rollout.port,
        dtype=config.policy.dtype.value,
        tensor_parallel_size=rollout.tensor_parallel_size,
        deterministic=rollout.deterministic,
        load_weights=load_weights,
        tokenizer=tokenizer,
        device=detect_device(),
        # With weights of their own they serve a command that has no trainer: all GPUs are theirs.
        first_gpu=0 if shares_devices or load_weights else _first_free_gpu(rollout, note),
        can_sleep=shares_devices,
        returns_routes=returns_routes(config),
        fp32_head=config.policy.fp32_head,
        api_key=api_key or secrets.token_hex(32),
        server_args=rollout.server_args,
    )
    return ServerPool.start(
        options,
        rollout.num_servers,
        log_dir,
        start_timeout_s=rollout.start_timeout_s,
        max_restarts=rollout.max_restarts,
        progress=note,
        while_waiting=while_waiting,
    )
