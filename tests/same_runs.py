"""Compares two runs of one recipe, bit for bit."""

import hashlib
import json
from pathlib import Path

import numpy as np

from megatron_rl.run.checkpoint_folder import read_driver
from megatron_rl.tracking.metrics_file import read_metrics

_MEASURED = (
    "time/", "memory/", "step/time_s", "step/tokens_per_s", "sync/", "rollout/num_server_restarts",
    "rollout/num_live_servers", "checkpoint/", "mismatch/",
)  # fmt: skip
"""Metrics of machine and time; and metrics of the server's log-probs, whose last bits depend on its prefix cache, which is
empty after a start."""


def differences(run: Path, whole: Path) -> list[str]:
    """Rows without what is measured of machine and time, the last checkpoint's driver state, and the weights."""
    rows = [{row.step: row.metrics for row in read_metrics(path / "metrics.jsonl")} for path in (run, whole)]
    if sorted(rows[0]) != sorted(rows[1]):
        return [f"steps {sorted(rows[0])} instead of {sorted(rows[1])}"]
    found = []
    for step, expected in rows[1].items():
        for name in sorted(expected.keys() | rows[0][step].keys()):
            pair = rows[0][step].get(name), expected.get(name)
            if repr(pair[0]) != repr(pair[1]) and not name.startswith(_MEASURED):  # nan is nan
                found.append(f"step {step}: {name} {pair[0]} instead of {pair[1]}")
    last = f"checkpoints/step-{max(rows[1])}"
    for what in (_driver, _models):
        mine, theirs = what(run / last), what(whole / last)
        found += [f"{last}: {key}" for key in sorted(theirs.keys() | mine.keys()) if mine.get(key) != theirs.get(key)]
    policies = [_policy(path) for path in (run, whole)]
    return found + ([f"policy: {policies}"] if policies[0] != policies[1] or not policies[0] else [])


def _driver(checkpoint: Path) -> dict[str, object]:
    """Slots, controllers, counters; its metrics are rows too."""
    state = json.loads(json.dumps(read_driver(checkpoint), default=np.ndarray.tolist))
    for slot in state["pool"]["slots"]:
        for segment in slot["segments"]:
            del segment["rollout_logprobs"]
    return {key: value for key, value in state.items() if key not in ("metrics", "server_restarts")}


def _models(checkpoint: Path) -> dict[str, object]:
    """SHA-256 of the files with weights and optimizers; .metadata has the time in it."""
    sums = {path.parent.name: json.loads(path.read_text()) for path in checkpoint.glob("*/checksums.json")}
    assert sums, f"{checkpoint} holds no models"
    return {f"{model}/{name}": entry for model, own in sums.items() for name, entry in own.items() if name != ".metadata"}


def _policy(run: Path) -> dict[str, str]:
    """SHA-256 of the weights that the run wrote at its end."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in run.glob("policy/*.safetensors")}
