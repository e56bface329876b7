"""``python -m tests.integration.hang_worker FOLDER`` on three ranks: a run that hangs, first in its reward, then in a collective.

The driver waits for a stage that waits for a grader that sleeps, and the other ranks for the driver. Once there is a file
``go``, two ranks wait in an update for the third, which sleeps.
"""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.parallel import collectives, hang_report, topology
from megatron_rl.rewards.workers.calls import RunnerSettings
from megatron_rl.rewards.workers.processes import RewardRunner
from megatron_rl.schedule.graph import Resource, Stage
from megatron_rl.step.runner import StageRunner
from megatron_rl.system.processes import process_probe
from megatron_rl.training.profiling import StageMeter
from megatron_rl.training.trainer_ranks import register_processes

LONG_S = 600.0
SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{"loads": [{"num_running_reqs": 3}]}')
    def log_message(self, *words): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler)
print("ready", flush=True)
server.serve_forever()
"""
"""A program whose command line looks like an SGLang server's."""


def main(folder: Path) -> None:
    place = topology.initialize(ParallelConfig(), seed=1)
    process_probe.enable_probe(f"trainer rank {place.rank}")
    register_processes(place, folder)
    if place.rank == 0:
        wait_for_a_grader(folder)
    else:
        process_probe.set_status("waits", "the driver's next command")
    collectives.broadcast_object(None, what="its next command")
    process_probe.set_status("waits")
    StageMeter().start_stage((3, "policy_update"))
    with hang_report.track_activity("update of the engine policy"):
        if place.rank == 2:
            (folder / "late").touch()
            look_at_a_file_forever()
        dist.all_reduce(torch.zeros(1))


def look_at_a_file_forever() -> None:
    time.sleep(LONG_S)


def wait_for_a_grader(folder: Path) -> None:
    port = (folder / "port").read_text()
    with server(port), RewardRunner("tests.integration.hostile_rewards:score", RunnerSettings(2, LONG_S)) as runner:
        event_loop = asyncio.new_event_loop()
        threading.Thread(target=event_loop.run_forever, daemon=True).start()

        async def score(step: int) -> None:
            scores = asyncio.create_task(runner.score_many([("sleep 1000", "")]))
            (folder / "scores").touch()
            while not (folder / "go").exists():
                await asyncio.sleep(0.05)
            scores.cancel()

        graph = (Stage("score", Resource.rollout, "rewards"),)
        stages = StageRunner(graph, event_loop, stall_timeout_s=LONG_S, on_span=print, heartbeat=lambda: None)
        stages.run({"score": score}, 4, 4)


@contextmanager
def server(port: str) -> Iterator[None]:
    words = [sys.executable, "-c", SERVER, "sglang.launch_server", "--host", "127.0.0.1", "--port", port]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield
        process.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
