"""Folders of runs with a few steps, for tests of the report."""

import re

from megatron_rl.desk.report.run_record import record_of
from megatron_rl.tracking.metrics_file import MetricsRow, MetricsWriter
from megatron_rl.tracking.timeline import Span, Timeline


def write_run(folder, *, config="run: {num_steps: 8}\n", reward=0.1, num_steps=8):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    timeline = Timeline()
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for step in range(1, num_steps + 1):
            writer.log(step, {
                "reward/mean": reward * step, "step/time_s": 60.0, "step/tokens_per_s": 10.0, "time/generate_s": 2.0 + reward,
                "time/rollout_idle_share": 0.25, "time/trainer_idle_share": 0.5, "memory/update_policy_host_gib": 3.25,
                "eval/accuracy": reward, "time/update_policy_s": 1.0,
            })  # fmt: skip
            rows = {"rows": 3, "tokens": 9, "prompt": "1 1 1", "held": "0 10 20", "new": f"{step} 5 5", "ended": "1 0 1", "ms": "1 1 1"}
            timeline.add(Span("generate", "rollout", step * 10.0, step * 10.0 + 2, step, {"rounds": [rows]}))
            work = {"rank_s": f"0:{step}.0 1:1.5 7:2.5"}
            timeline.add(Span("update_policy", "trainer", step * 10.0 + 2, step * 10.0 + 3, step, work))
    timeline.write(folder / "timeline.json")
    return folder


def text_of(page):
    return re.sub(r"\s+", " ", re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL))


def record(*metrics, spans=()):
    return record_of("run", [MetricsRow(step, 0.0, values) for step, values in enumerate(metrics, 1)], spans=spans)
