"""``python -m tests.integration.forked_ranks NUM_RANKS MODULE ARGUMENT...``: the module as ranks that share their imports.

One process imports Megatron Core and forks the ranks before anything has started a thread. The first rank that fails
ends the others; its exit status is this process's. One rank runs without a process group, as under no launcher.
"""

import os
import runpy
import signal
import socket
import sys
import traceback

import megatron_rl.training.trainer_group  # noqa: F401  (what every worker needs)


def main(num_ranks: int, module: str, arguments: list[str]) -> int:
    if num_ranks == 1:
        return run(module, arguments)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sys.stdout.flush()
    waiting = {fork(rank, num_ranks, port, module, arguments) for rank in range(num_ranks)}
    status = 0
    while waiting:
        pid, result = os.wait()
        waiting.discard(pid)
        if result and not status:
            status = os.waitstatus_to_exitcode(result)
            for other in waiting:
                os.kill(other, signal.SIGTERM)
    return 1 if status < 0 else status


def fork(rank: int, num_ranks: int, port: int, module: str, arguments: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    status = run(module, arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(module: str, arguments: list[str]) -> int:
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
