"""Foreground servers for a trainer that attaches to them: `megatron-rl serve`."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megatron_rl.rollout.server_pool import ServerPool
from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.rollout.sglang.process.server import ServerError, SglangServer
from megatron_rl.system.files.atomic_files import write_whole

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

    A server that exits is restarted, at most three times. ``log_path``: with several servers the i-th writes NAME-i.
    ``url_file`` receives their URLs, one per line, once all servers answer, and is removed when they stop. Must be
    called from the main thread, because it installs signal handlers. A SIGTERM or SIGHUP that the parent ignores stays
    ignored.
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
                write_whole(url_file, "".join(f"{url}\n" for url in pool.urls))
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

