"""One episode of a verifiers 0.4.0 task set: runs ``vf-eval`` for one task, and writes the reward of its trace to result.txt.

verifiers runs its own harness program, which asks the policy at the base URL; its trace is joined on the session.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
command = [
    str(Path(sys.executable).with_name("vf-eval")), "tiny-sums", "-n", "1", "-m", "policy", "--no-push",
    "--env.agent.runtime.type", "subprocess", "--env.agent.harness.id", "null",
    "--client.base-url", os.environ["OPENAI_BASE_URL"], "--client.api-key-var", "OPENAI_API_KEY", "--output-dir", "verifiers",
]  # fmt: skip
# verifiers installs its harness by uv when it starts; the cache makes that a matter of milliseconds after the first time.
variables = {**os.environ, "PYTHONPATH": str(HERE), "ROW_FILE": os.path.abspath("row.json")}
variables["PATH"] = f"{Path(sys.executable).parent}:{variables['PATH']}"
variables.setdefault("UV_CACHE_DIR", str(HERE.parents[1] / "outputs" / "agents" / "uv_cache"))
subprocess.run(command, env=variables, check=True)

(traces,) = Path("verifiers").rglob("traces.jsonl")
(episode,) = map(json.loads, traces.read_text().splitlines())
(trace,) = episode["traces"]
if not episode["ok"] or not trace["ok"]:
    sys.exit(f"the episode failed: {episode['errors'] or trace['errors']}")  # no score: masked and counted
reward = sum(one["score"] * one["weight"] for one in trace["rewards"].values())
Path("result.txt").write_text(str(reward))
