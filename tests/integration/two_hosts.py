"""Two hosts on one machine: network namespaces with one address each and no other network."""

import os
import signal
import subprocess
from pathlib import Path

FIRST, SECOND = "10.77.0.1", "10.77.0.2"
_NAMESPACE = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]
_SCRIPT = f"""
set -eu
ip link set lo up
unshare --net bash -c '
    ip link set lo up
    until ip addr add {SECOND}/24 dev there 2>/dev/null; do sleep 0.05; done
    ip link set there up
    exec "$@"' second "$@" second &
until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.02; done
ip link add here type veth peer name there netns $!
ip addr add {FIRST}/24 dev here
ip link set here up
trap 'kill $! 2>/dev/null || true' EXIT
"$@" first
wait $!
"""


def obstacle() -> str:
    """Reason why this machine cannot act as two hosts; empty if it can."""
    try:
        tried = subprocess.run(
            [*_NAMESPACE, "bash", "-c", "ip link add here type veth peer name there"], capture_output=True, text=True, timeout=20
        )
    except OSError as error:
        return str(error)
    return "" if tried.returncode == 0 else f"no network namespaces: {tried.stderr.strip()}"


def run_on_both(command: list[str], environment: dict[str, str], log: Path, timeout_s: float) -> int:
    """Run ``command first`` and ``command second``, each on its host, at the same time; the exit status."""
    with log.open("w") as file:
        process = subprocess.Popen(
            [*_NAMESPACE, "bash", "-c", _SCRIPT, "two-hosts", *command],
            env={**os.environ, **environment},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # ignored if the tests run under nohup
        )
        try:
            return process.wait(timeout_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
