"""The commands as a user runs them: two torchrun ranks, a real SGLang server, real MLflow; and what goes wrong."""

import contextlib
import gzip
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from itertools import pairwise

import psutil
import pytest

from megatron_rl.cli import main
from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.rollout.sglang.process.server import SglangServer
from megatron_rl.run.checkpoint_folder import read_driver
from megatron_rl.run.checkpoints import policy_exports
from megatron_rl.system.processes.signals import STOPPED
from megatron_rl.tracking.metrics_file import read_metrics
from megatron_rl.tracking.samples_file import read_samples, sample_files
from megatron_rl.tracking.status import read_status
from megatron_rl.tracking.timeline import overlap_seconds, read_timeline
from tests.integration.preloaded import preloading, serving
from tests.no_wings import blocking
from tests.same_runs import differences
from tests.tiny_models import make_tiny_model

TIMEOUT_S = 400
RECIPE = """
preset: tppo
run: {{num_steps: 3, seed: 3}}
policy:
  path: {folder}/model
  init: random
  optimizer: {{lr: 1.0e-3, warmup_steps: 2}}
critic: {{warmup_steps: 1, optimizer: {{lr: 1.0e-3}}}}
parallel: {{num_ranks: 2, collective_timeout_s: 120}}
batch:
  num_prompts_per_step: 8
  num_samples_per_prompt: 2
  max_prompt_tokens: 32
  max_response_tokens: 24
  window_tokens: 10
  window_jitter_tokens: 3
  policy_minibatch_size: 8
  critic_minibatch_size: 8
  max_tokens_per_microbatch: 256
algorithm: {{ignore_boundary_tokens: 2}}
data: {{train_files: ["{folder}/train.jsonl"]}}
eval:
  sets:
    greedy: {{files: ["{folder}/eval.jsonl"]}}
    drawn: {{files: ["{folder}/eval.jsonl"], num_samples: 3, temperature: 1.0, top_p: 0.95}}
reward: {{name: math}}
sft: {{num_steps: 4, batch_size: 8, output_path: "{folder}/sft"}}
critic_pretrain: {{num_steps: 2, output_path: "{folder}/critic"}}
"""
FINISHED_RUN = (
    "run.num_steps=5",
    "run.save_every_steps=2",
    "run.keep_policy_every_s=0.001",
    "eval.every_steps=2",
    "rollout.parity_every_steps=3",
    "profile.steps=[2]",
    "profile.ranks=[1]",
    "profile.stages=[update_policy,values]",
    "tracking.mlflow_model=tiny",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def attached(folder):
    """Key of a run on the server that all runs here share which do not start, lose or stop one themselves."""
    options = ServerOptions(str(folder / "model"), deterministic=True, load_weights=False)
    with serving(SglangServer(options, folder / "sglang.log", start_timeout_s=400.0)) as server:
        yield f"rollout.urls=[{server.url}]"


def make_task(folder):
    """A tiny model, data and recipe.yaml in ``folder``."""
    # Short responses from random weights: the end-of-text token is one of few.
    make_tiny_model(folder / "model", vocab_size=80)
    rng = random.Random(0)
    for name, count in (("train", 40), ("eval", 4)):
        rows = []
        for i in range(count):
            a, b = rng.randint(0, 99), rng.randint(0, 99)
            rows.append(
                {"id": f"{name}{i}", "prompt": f"{a:02d}+{b:02d}=", "answer": str(a + b), "response": str(a + b)}
            )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    return folder


def start(folder, command, *overrides, python_path=(), forks=True, servers=True):
    """``forks``: the processes that start have their imports already (``preloaded.py``), and so, if ``servers``, have theirs."""
    arguments = [sys.executable, "-m", "megatron_rl.cli", command, "--config", str(folder / "recipe.yaml"), *overrides]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["OMP_NUM_THREADS"] = "1"
    if python_path:
        environment["PYTHONPATH"] = os.pathsep.join([*map(str, python_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with preloading(servers=servers) if forks else contextlib.nullcontext():
        return subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
        )


def run(folder, command, *overrides, python_path=()):
    """(exit status, output) of a command that ends by itself."""
    process = start(folder, command, *overrides, python_path=python_path)
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        stop_tree(process)
    return process.returncode, output


def stop_tree(process):
    """Kill processes that a failed test left running."""
    for child in descendants(process.pid):
        child.kill()
    if process.poll() is None:
        process.kill()
    process.wait()


def descendants(pid):
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def addresses_listened_on(pid):
    """[address, process] of every port on which the run takes connections."""
    found = set()
    for process in (psutil.Process(pid), *descendants(pid)):
        with contextlib.suppress(psutil.NoSuchProcess):
            connections = process.net_connections("inet")
            found |= {(c.laddr.ip, process.name()) for c in connections if c.status == psutil.CONN_LISTEN}
    return sorted(found)


def wait_until(condition, process, what):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None, f"ended before {what}:\n{process.stdout.read()}"
        assert time.monotonic() < deadline, f"no {what} within {TIMEOUT_S} s"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def finished_run(folder):
    """A run whose server is killed in the middle of a step."""
    output_dir = folder / "run"
    process = start(folder, "train", f"run.output_dir={output_dir}", *FINISHED_RUN, forks=False)
    try:
        wait_until(lambda: read_metrics(output_dir / "metrics.jsonl"), process, "the evaluation before training")
        servers = [p for p in descendants(process.pid) if "sglang" in " ".join(p.cmdline()) or "sglang" in p.name()]
        assert servers
        (output_dir / "listeners.json").write_text(json.dumps(addresses_listened_on(process.pid)))
        for server in servers:
            if server.is_running():
                server.kill()
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        stop_tree(process)
    assert process.returncode == 0, output
    return output_dir, output


def test_a_run_whose_server_is_killed_continues_and_loses_no_token(finished_run):
    output_dir, output = finished_run
    rows = {row.step: row.metrics for row in read_metrics(output_dir / "metrics.jsonl")}
    assert sorted(rows) == [0, 1, 2, 3, 4, 5]
    assert rows[5]["rollout/num_server_restarts"] == 1
    assert "is lost" in output and "serves again" in output
    for step in range(1, 6):
        metrics = rows[step]
        assert metrics["rollout/num_slots"] == 16
        carried_on = 16 - metrics["rollout/num_finished"]
        if step < 5:
            assert rows[step + 1]["rollout/num_carried"] == carried_on
        # Every unfinished response filled its window, whatever happened to the server; first windows have 8 to 10 tokens.
        assert metrics["step/tokens_generated"] >= 8 * carried_on
        assert metrics["mismatch/max_abs_log_ratio"] < 1e-3


def test_a_run_on_one_node_accepts_connections_from_that_node_only(finished_run):
    """SECURITY.md names no exception for such a run."""
    listeners = json.loads((finished_run[0] / "listeners.json").read_text())
    assert {"sglang::scheduler"} < {process for _, process in listeners}  # and the launcher, ranks, the HTTP process
    assert {address for address, _ in listeners} == {"127.0.0.1"}


def test_the_servers_key_appears_only_in_their_private_logs(finished_run):
    """A run without a key in its recipe gives its servers a random key."""
    output_dir, output = finished_run
    log = (output_dir / "logs" / "sglang-0.log").read_text()
    (key,) = set(re.findall(r"'api_key': '([0-9a-f]{64})'", log))
    assert (output_dir / "logs" / "sglang-0.log").stat().st_mode & 0o077 == 0
    others = [path for path in output_dir.rglob("*") if path.is_file() and path.suffix != ".log"]
    assert len(others) > 5 and not [path for path in others if key.encode() in path.read_bytes()]
    assert key not in output


def test_megatron_and_sglang_are_compared_before_training(finished_run):
    assert "Megatron and SGLang agree on" in finished_run[1]


def test_parity_is_checked_during_the_run_and_memory_is_measured_per_stage(finished_run):
    output_dir, _ = finished_run
    steps = {row.step: row.metrics for row in read_metrics(output_dir / "metrics.jsonl")}
    compared = {step for step, metrics in steps.items() if "mismatch/parity_max" in metrics}
    # Before training, which goes with the first step, and after three steps.
    assert compared == {1, 3} and steps[3]["mismatch/parity_max"] < 1e-4
    assert 0 <= steps[1]["mismatch/parity_mean"] <= steps[1]["mismatch/parity_max"] < 1e-4
    for stage in ("old_logprobs", "values", "update_policy", "publish", "update_critic", "checkpoint"):
        assert 0.05 < steps[4][f"memory/{stage}_host_gib"] < 20
    assert 0 < steps[4]["memory/host_used_share"] < 1


def test_the_critic_trains_while_the_next_window_is_generated(finished_run):
    spans = read_timeline(finished_run[0] / "timeline.json")
    assert overlap_seconds(spans, "generate", "update_critic") > 0
    assert {span.lane for span in spans} == {"rollout", "trainer", "host"}


def test_a_run_records_the_work_of_its_stages_and_its_schedule_can_be_replayed(finished_run, capsys):
    output_dir, _ = finished_run
    rows = {row.step: row.metrics for row in read_metrics(output_dir / "metrics.jsonl")}
    spans = read_timeline(output_dir / "timeline.json")
    generated = {span.step: span.args for span in spans if span.name == "generate"}
    assert {step: facts["rounds"][0]["tokens"] for step, facts in generated.items()} == {
        step: row["step/tokens_generated"] for step, row in rows.items() if step
    }
    assert all(int(ms) > 0 for facts in generated.values() for ms in facts["rounds"][0]["ms"].split())
    assert all(facts["cpu_s"] > 0 for facts in generated.values())
    assert all(span.args["cpu_s"] > 0 for span in spans if span.name in ("values", "update_critic"))
    assert main(["simulate", "--run", str(output_dir), "--replay", "--json"]) == 0
    measured, fitted = json.loads(capsys.readouterr().out).values()
    # Five steps of a second with evaluations: the gaps between stages on a busy machine are all that may differ.
    assert abs(measured["error"]) < 0.1 and abs(fitted["error"]) < 0.5


def test_the_policy_is_frozen_during_critic_warm_up_and_trains_after_it(finished_run):
    rows = {row.step: row.metrics for row in read_metrics(finished_run[0] / "metrics.jsonl")}
    assert "policy/grad_norm" not in rows[1] and "critic/grad_norm" in rows[1]
    assert rows[2]["policy/num_updates"] == 2 and rows[2]["policy/grad_norm"] > 0


def test_evaluation_sets_run_concurrently_with_their_own_sampling(finished_run):
    output_dir, output = finished_run
    rows = {row.step: row.metrics for row in read_metrics(output_dir / "metrics.jsonl")}
    assert sorted(step for step in rows if "eval/accuracy" in rows[step]) == [0, 2, 4, 5]
    assert {"eval/accuracy_stderr", "eval/greedy/accuracy", "eval/drawn/pass@1", "eval/drawn/pass@3"} <= set(rows[5])
    # The same prompts with other responses.
    lengths = [[rows[step][f"eval/{name}/response_tokens_mean"] for step in (0, 2, 4, 5)] for name in ("greedy", "drawn")]
    assert lengths[0] != lengths[1]
    assert "prompts to evaluate on (drawn): 4" in output and "± " in output


def test_kept_policies_give_the_same_responses_after_the_run(finished_run, folder, attached):
    output_dir, _ = finished_run
    kept = policy_exports(output_dir)
    assert [one.step for one in kept] == [1, 2, 3, 4, 5]
    assert all(0 < one.trained_s < other.trained_s for one, other in pairwise(kept))
    folders = [str(one.folder) for one in kept if one.step in (2, 4, 5)]
    status, output = run(folder, "evaluate", f"run.output_dir={folder}/evaluation", attached, "--policies", *folders)
    assert status == 0 and "3/3" in output, output
    rows = {row.step: row.metrics for row in read_metrics(output_dir / "metrics.jsonl")}
    found = {one.step: json.loads((one.folder / "evaluation.json").read_text()) for one in kept if one.step in (2, 4, 5)}
    for step, written in found.items():
        in_the_run = {name: value for name, value in rows[step].items() if name.startswith("eval/")}
        assert in_the_run and {name: written["metrics"][name] for name in in_the_run} == in_the_run, step
    # Another policy gives other responses: the servers did take the weights of each.
    assert len({written["metrics"]["eval/drawn/response_tokens_mean"] for written in found.values()}) > 1


def test_stored_responses_add_up_to_the_steps_metrics(finished_run):
    output_dir, _ = finished_run
    rows = {row.step: row.metrics for row in read_metrics(output_dir / "metrics.jsonl")}
    stored = {step: read_samples([path]).to_pylist() for step, path in sample_files(output_dir).items()}
    assert list(stored) == [1, 2, 3, 4, 5] and all(len({row["id"] for row in found}) == 16 for found in stored.values())
    so_far = {}
    for step, found in stored.items():
        metrics = rows[step]
        rewards = [row["reward"] for row in found if row["reward"] is not None]
        assert len(rewards) == metrics["rollout/num_finished"] - metrics["reward/num_unscored"]
        assert not rewards or sum(rewards) / len(rewards) == pytest.approx(metrics["reward/mean"])
        assert sum(row["new_tokens"] for row in found) == metrics["step/tokens_generated"]
        counted = metrics["advantage/finished_tokens"] + metrics["advantage/unfinished_tokens"]
        assert sum(row["trained_tokens"] for row in found) == counted
        apart, advantages = [], []
        for row in found:
            for server, trainer, advantage, trains in zip(
                *(row[name] for name in ("rollout_logprobs", "trainer_logprobs", "advantages", "mask")), strict=True
            ):
                if trains:
                    apart.append(server - trainer)
                    advantages.append(advantage)
            # A response is in every step's rows until it ends, and only grows.
            assert row["token_ids"][: len(so_far.get(row["id"], []))] == so_far.get(row["id"], [])
            so_far[row["id"]] = row["token_ids"]
            assert row["length"] == len(row["token_ids"]) == len(row["token_ends"]) and row["token_ends"][-1] == len(row["response"])
            assert row["question"] == row["prompt"] and row["values"] is not None
        assert sum(apart) / len(apart) == pytest.approx(metrics["mismatch/kl"], abs=1e-9)
        assert max(map(abs, apart)) == pytest.approx(metrics["mismatch/max_abs_log_ratio"], abs=1e-9)
        # The preset normalises over the tokens that train.
        mean = sum(advantages) / len(advantages)
        assert sum((one - mean) ** 2 for one in advantages) / len(advantages) == pytest.approx(1.0, abs=1e-3)


def test_mlflow_has_params_metrics_and_artifacts(finished_run):
    with sqlite3.connect(finished_run[0] / "mlflow.db") as store:
        params = dict(store.execute("select key, value from params"))
        steps = {row[0] for row in store.execute("select step from metrics where key = 'step/tokens_generated'")}
        evaluated = {row[0] for row in store.execute("select key from metrics where key like 'eval/drawn/%'")}
        (status,) = store.execute("select status from runs").fetchone()
    assert params["batch.window_tokens"] == "10" and steps == {1, 2, 3, 4, 5} and status == "FINISHED"
    assert {"eval/drawn/accuracy_stderr", "eval/drawn/pass_at_3"} <= evaluated
    names = {path.name for path in (finished_run[0] / "mlflow_artifacts").rglob("*") if path.is_file()}
    assert {"config.yaml", "report.html"} <= names


def test_the_profiler_writes_traces_of_the_chosen_steps_ranks_and_stages(finished_run):
    folder = finished_run[0] / "profile"
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == ["step-2/rank-1/update_policy.json.gz", "step-2/rank-1/values.json.gz"]
    events = json.loads(gzip.decompress((folder / files[0]).read_bytes()))["traceEvents"]
    assert any("Backward" in event.get("name", "") for event in events)


def test_watch_shows_the_run_and_each_rank_reports_its_working_time(finished_run, capsys):
    assert main(["watch", str(finished_run[0]), "--once"]) == 0
    words = capsys.readouterr().out
    assert "finished" in words and "step 5/5" in words and "weights" in words and "is lost" in words
    updates = [span for span in read_timeline(finished_run[0] / "timeline.json") if span.name == "update_policy"]
    ranks = [[word.partition(":") for word in span.args["rank_s"].split()] for span in updates if span.step > 1]
    assert ranks and all([rank for rank, _, _ in one] == ["0", "1"] and all(float(s) > 0 for _, _, s in one) for one in ranks)


def test_the_final_policy_is_a_version_of_the_registered_model(finished_run):
    with sqlite3.connect(finished_run[0] / "mlflow.db") as store:
        versions = store.execute("select name, version, source from model_versions").fetchall()
    assert versions == [("tiny", 1, (finished_run[0] / "policy").resolve().as_uri())]


def test_a_run_ends_with_a_table_a_report_and_a_policy_that_loads(finished_run):
    output_dir, output = finished_run
    assert "accuracy on held-out prompts" in output and "wall-clock time by stage" in output
    assert (output_dir / "report.html").stat().st_size > 10_000
    assert (output_dir / "policy" / "config.json").is_file() and list((output_dir / "policy").glob("*.safetensors"))


def test_ctrl_c_saves_and_ends_every_child_and_the_resumed_run_equals_the_whole_run(finished_run, folder, attached):
    output_dir = folder / "stopped"
    # Checkpoints in the background leave the same run, too.
    command = ("train", f"run.output_dir={output_dir}", "run.resume=auto", "run.async_save=true", *FINISHED_RUN)
    process = start(folder, *command, forks=False)
    try:
        wait_until(lambda: len(read_metrics(output_dir / "metrics.jsonl")) > 2, process, "the second step")
        children = descendants(process.pid)
        assert len(children) > 4
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    finally:
        stop_tree(process)
    assert process.returncode == STOPPED and "run.resume=auto" in output and "Traceback" not in output
    assert read_status(output_dir).state == "stopped"
    steps_done = json.loads((output_dir / "summary.json").read_text())["num_steps"]
    assert 2 <= steps_done < 5 and (output_dir / "checkpoints" / f"step-{steps_done}" / "driver.json").is_file()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    status, output = run(folder, *command, attached)
    assert status == 0, output
    assert differences(output_dir, finished_run[0]) == []
    with sqlite3.connect(output_dir / "mlflow.db") as store:
        steps = [row[0] for row in store.execute("select step from metrics where key = 'step/tokens_generated'")]
    assert sorted(steps) == [1, 2, 3, 4, 5]


def test_a_second_run_into_the_same_folder_is_refused_unless_it_resumes(finished_run, folder, attached, capsys):
    output_dir, _ = finished_run
    status = main(["train", "--config", str(folder / "recipe.yaml"), f"run.output_dir={output_dir}"])
    said = capsys.readouterr().err
    assert status == 2 and "already contains a run" in said and "run.resume=true" in said
    status, output = run(folder, "train", f"run.output_dir={output_dir}", "run.resume=true", "run.num_steps=7", attached)
    assert status == 0, output
    rows = {row.step: row.metrics for row in read_metrics(output_dir / "metrics.jsonl")}
    assert sorted(rows) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert rows[6]["rollout/num_carried"] == 16 - rows[5]["rollout/num_finished"]
    # Token for token what an uninterrupted run does, although this one lost its server and was stopped in between, and
    # that one spreads its models in other ways: data parallel here, context parallel and pipelined there.
    layouts = ("parallel.context_parallel_size=2", "critic.parallel.pipeline_parallel_size=2", "tracking.mlflow=false", attached)
    status, output = run(folder, "train", f"run.output_dir={folder}/whole", "run.num_steps=7", *layouts)
    assert status == 0, output
    assert tokens_in_progress(folder / "whole") == tokens_in_progress(output_dir)
    whole = {row.step: row.metrics for row in read_metrics(folder / "whole" / "metrics.jsonl")}
    for name in ("step/tokens_generated", "rollout/num_finished", "policy/grad_norm", "critic/loss"):
        assert whole[7][name] == pytest.approx(rows[7][name], rel=1e-3), name
    # An evaluation's samples are the same ones too.
    measured = [name for name in whole[7] if name.startswith("eval/")]
    assert "eval/drawn/pass@3" in measured and {name: whole[7][name] for name in measured} == {
        name: rows[7][name] for name in measured
    }


def tokens_in_progress(output_dir):
    """(prompt, response) tokens of every response that the last checkpoint holds."""
    pool = read_driver(output_dir / "checkpoints" / "step-7")["pool"]
    prompts = [prompt["token_ids"].tolist() for prompt in pool["prompts"]]
    return [(prompts[t["prompt"]], [s["token_ids"].tolist() for s in t["segments"]]) for t in pool["slots"]]


def test_sft_and_critic_pretraining_write_models_that_train_takes(folder, attached, capsys):
    status, output = run(folder, "sft")
    assert status == 0 and "sft step 4/4" in output, output
    status, output = run(
        folder,
        "critic-pretrain",
        f"policy.path={folder}/sft",
        "policy.init=checkpoint",
        f"run.output_dir={folder}/first",
        attached,
    )
    assert status == 0, output
    assert list((folder / "critic").glob("*.safetensors"))
    rows = [row.metrics for row in read_metrics(folder / "first" / "critic_pretrain_run" / "metrics.jsonl") if row.step > 0]
    assert all("critic/grad_norm" in row and "policy/grad_norm" not in row for row in rows) and len(rows) == 2
    paths = (f"policy.path={folder}/sft", "policy.init=checkpoint", f"critic.path={folder}/critic", f"run.output_dir={folder}/first")
    assert main(["train", "--config", str(folder / "recipe.yaml"), *paths, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "batch arithmetic" in said and "stages of a step" in said


def test_training_imports_nothing_of_the_desk(folder, tmp_path, attached):
    """Without the desk a run has no report.html, and nothing else is missing."""
    (tmp_path / "sitecustomize.py").write_text(blocking("desk"))
    output_dir = folder / "without_desk"
    short = (f"run.output_dir={output_dir}", "run.num_steps=2", "parallel.num_ranks=1", "tracking.mlflow=false", attached)
    status, output = run(folder, "train", *short, "tracking.report_every_steps=1", python_path=[tmp_path])
    assert status == 0, output
    assert [row.step for row in read_metrics(output_dir / "metrics.jsonl")][-2:] == [1, 2]
    assert (output_dir / "policy" / "config.json").is_file() and (output_dir / "timeline.json").is_file()
    assert "the report could not be written: ModuleNotFoundError: megatron_rl.desk" in output
    assert not (output_dir / "report.html").exists()


def test_a_collapsed_run_rolls_back_to_its_last_healthy_checkpoint_and_uses_other_prompts(folder, attached):
    output_dir = folder / "rolled_back"
    # The reward of the third step's prompts fails, each time that they are asked.
    rows = [{"prompt": f"{i:02d}+01=", "answer": "fail" if 8 <= i < 12 else "good"} for i in range(40)]
    (folder / "failing.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, output = run(
        folder,
        "train",
        f"run.output_dir={output_dir}",
        "run.num_steps=4",
        "run.save_every_steps=1",
        "run.async_save=true",
        "parallel.num_ranks=1",
        "data.shuffle=false",
        "batch.num_prompts_per_step=4",
        "batch.window_tokens=0",
        "schedule.mode=sync",
        f"data.train_files=[{folder}/failing.jsonl]",
        "data.eval_files=[]",
        "reward.name=tests.integration.failing_reward:failing",
        "health.reward_errors=roll_back",
        "tracking.mlflow=false",
        attached,
    )
    assert status == 0, output
    assert "back to step 2, with the prompts that come next" in output
    rows = {row.step: row.metrics for row in read_metrics(output_dir / "metrics.jsonl")}
    assert [rows[step]["health/num_rollbacks"] for step in (1, 2, 3, 4)] == [0, 0, 1, 1]
    assert rows[3]["reward/error_rate"] == 0 and (output_dir / "rolled_back_1.jsonl").is_file()
    assert (output_dir / "policy" / "config.json").is_file()


def test_a_port_in_use_is_reported_before_training(folder, tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, output = run(folder, "train", f"run.output_dir={tmp_path}/run", f"rollout.port={port}", "parallel.num_ranks=1")
    assert status != 0 and str(port) in output and "Traceback" not in output, output
