"""A stand-in for SLURM on the two hosts of ``two_hosts``: jobs for a host are files that its agent starts and answers.

    python -m tests.integration.slurm_hosts FOLDER HOST          # the agent; the first host also runs the batch script
    python -m tests.integration.slurm_hosts FOLDER srun ...      # as srun: one task per node of --nodelist
"""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from tests.integration.two_hosts import FIRST, SECOND

ADDRESSES = {"first": FIRST, "second": SECOND}
_POLL_S = 0.1


def srun(folder: Path, words: list[str]) -> int:
    """Run the command once per node; the largest exit status. HUP and TERM go to all tasks."""
    at = words.index("bash")
    options = dict(word.split("=", 1) for word in words[:at] if "=" in word)
    tasks = []
    for number, node in enumerate(options["--nodelist"].split(",")):
        task = folder / f"{node.replace('.', '-')}_{uuid.uuid4().hex}"
        environment = {**os.environ, "SLURM_NODEID": str(number), "SLURMD_NODENAME": node}
        _write(task.with_suffix(".job"), json.dumps({"command": words[at:], "environment": environment}))
        tasks.append(task)
    for sent in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(sent, lambda number, _: [_write(task.with_suffix(".signal"), str(number)) for task in tasks])
    while not all(task.with_suffix(".exit").exists() for task in tasks):
        time.sleep(_POLL_S)
    return max(int(task.with_suffix(".exit").read_text()) for task in tasks)


def agent(folder: Path, host: str) -> int:
    """Start the tasks of this host until the batch script has ended; its exit status on the first host."""
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    script = [] if host != "first" else [subprocess.Popen(["bash", *json.loads((folder / "script.json").read_text())], env=environment)]
    running: dict[Path, subprocess.Popen[bytes]] = {}
    while not (folder / "ended").exists() or running:
        for job in folder.glob(f"{ADDRESSES[host].replace('.', '-')}_*.job"):
            asked = json.loads(job.read_text())
            job.unlink()
            running[job] = subprocess.Popen(asked["command"], env=asked["environment"], cwd=folder)
        for job, task in list(running.items()):
            if job.with_suffix(".signal").exists():
                task.send_signal(int(job.with_suffix(".signal").read_text()))
                job.with_suffix(".signal").unlink()
            if (status := task.poll()) is not None:
                del running[job]
                _write(job.with_suffix(".exit"), str(abs(status)))
        if script and script[0].poll() is not None:
            _write(folder / "ended", "")
        time.sleep(_POLL_S)
    return script[0].returncode if script else 0


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(f".{uuid.uuid4().hex}")
    part.write_text(text)
    part.rename(path)


if __name__ == "__main__":
    place, kind, *rest = sys.argv[1:]
    sys.exit(srun(Path(place), rest) if kind == "srun" else agent(Path(place), kind))
