"""Real servers that join and leave a run while it trains, and a separate evaluation server."""

import signal

import pytest

from megatron_rl.rollout.server_pool import ServerPool
from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.tracking.metrics_file import read_metrics
from megatron_rl.tracking.timeline import read_timeline
from tests.integration.preloaded import preloading
from tests.integration.test_train import make_task, start, stop_tree, wait_until

OPTIONS = (
    "schedule.mode=tppo",
    "run.num_steps=1000",
    "parallel.num_ranks=1",
    "eval.every_steps=2",
    "rollout.parity_every_steps=0",
    "tracking.mlflow=false",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("membership"))


@pytest.fixture(scope="module")
def servers(folder):
    options = ServerOptions(str(folder / "model"), deterministic=True, load_weights=False)
    with preloading():
        pool = ServerPool.start(options, 3, folder / "logs", start_timeout_s=400.0)
    with pool:
        yield pool.urls


def test_servers_join_and_leave_a_run_while_another_evaluates(folder, servers):
    first, second, evaluates = servers
    (folder / "urls").mkdir()
    (folder / "urls" / "first.urls").write_text(first)
    metrics, output_dir = folder / "run" / "metrics.jsonl", folder / "run"
    process = start(
        folder, "train", f"run.output_dir={output_dir}", f"rollout.urls_file={folder / 'urls'}", f"eval.urls=[{evaluates}]", *OPTIONS
    )

    def live() -> list[float]:
        return [row.metrics.get("rollout/num_live_servers", 0.0) for row in read_metrics(metrics)]

    try:
        wait_until(lambda: 1.0 in live(), process, "a step with one server")
        (folder / "urls" / "second.urls").write_text(second)
        wait_until(lambda: 2.0 in live(), process, "a step with two servers")
        (folder / "urls" / "first.urls").unlink()
        wait_until(lambda: live()[-1] == 1.0, process, "a step without the first server")
        num_steps = len(live())
        wait_until(lambda: len(live()) > num_steps + 2, process, "further steps")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    finally:
        stop_tree(process)
    assert f"{second} has joined, with weight version" in output and f"{first} has left, and may be stopped: 1 serve" in output
    rows = {row.step: row.metrics for row in read_metrics(metrics)}
    assert sorted(rows) == list(range(len(rows)))
    assert all(row["rollout/num_slots"] == 16 and row["rollout/staleness_max"] == 0 for step, row in rows.items() if step)
    # Tokens sampled by any server have the log-probs of the trainer's weights.
    assert all(row["mismatch/max_abs_log_ratio"] < 1e-3 for step, row in rows.items() if step)
    evaluated = [step for step, row in rows.items() if "eval/accuracy" in row]
    assert evaluated[:3] == [0, 2, 4]
    timeline = read_timeline(output_dir / "timeline.json")
    assert {2, 4} <= {span.step for span in timeline if span.lane == "evaluation"}
    spans = [span for span in timeline if span.name == "evaluate"]
    assert spans and all(span.end_s - span.start_s < 0.5 for span in spans), "training waited for an evaluation"
