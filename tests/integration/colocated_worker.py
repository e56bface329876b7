"""The run of test_colocated.py: its server is killed asleep, after the first window.

argv: what `megatron-rl train` takes.
"""

import os
import signal
import sys

from megatron_rl import cli
from megatron_rl.rollout.service import RolloutService

KILLED_AT = 2
"""The first sleep comes before the log-probs are compared, the second one in the first step."""

_sleep = RolloutService.sleep
sleeps: list[RolloutService] = []


def sleep_and_die(service: RolloutService) -> None:
    _sleep(service)
    sleeps.append(service)
    if len(sleeps) == KILLED_AT:
        (server,) = service._servers.servers
        os.killpg(server.pid, signal.SIGKILL)
        print("killed asleep", flush=True)


if __name__ == "__main__":
    RolloutService.sleep = sleep_and_die
    sys.exit(cli.main(["train", *sys.argv[1:]]))
