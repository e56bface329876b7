"""Workers of the tests on several ranks."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.integration.preloaded import preloading

REPOSITORY = Path(__file__).parents[2]


def run_ranks(
    num_ranks: int,
    module: str,
    *arguments: object,
    log: Path,
    timeout_s: float,
    launcher: tuple[object, ...] = ("tests.integration.forked_ranks",),
) -> None:
    """Run ``python -m module`` on ``num_ranks`` ranks to its end; a failure shows the end of the log.

    Nothing is left of it, whatever happens. The ranks are forked from one process that has imported what all of them need
    (``forked_ranks.py``), and that one from the template of all launches (``preloaded.py``): imports are most of what a small
    launch costs. That torchrun starts ranks as well is tested with the commands themselves. ``launcher``: the module that
    forks, with its first arguments.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    with log.open("w") as out, preloading():
        process = subprocess.Popen(
            [sys.executable, "-m", *map(str, (*launcher, num_ranks, module, *arguments))],
            cwd=REPOSITORY,
            env={**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert code == 0, log.read_text()[-6000:]
