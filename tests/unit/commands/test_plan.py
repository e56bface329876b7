"""`megatron-rl plan` as a user types it."""

import json
import time
from pathlib import Path

import pytest
import yaml

from megatron_rl.cli import main
from megatron_rl.config.load import load_config, to_yaml_values
from megatron_rl.config.schema import Config
from tests.tiny_models import make_tiny_model

MODELS = Path(__file__).parents[3] / "tools" / "published" / "models"
SMALL = ("--slots", "512", "--top", "3")
FEW_PLANS = ("--windows", "1024", "parallel.tensor_parallel_size=8")


def said(capsys, *words) -> str:
    assert main(["plan", *map(str, words)]) == 0
    return capsys.readouterr().out


def refused(capsys, *words) -> str:
    assert main(["plan", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_plan_tables_fit_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = said(capsys, "--model", MODELS / "qwen3-30b-a3b", "--gpus", 16, *SMALL)
    assert "…" not in text
    for word in ("s per", "bottleneck", "plan 1", "policy: gradients", "server: KV cache", "refused", "TP does not divide", "bottleneck:"):
        assert word in text
    table = [line for line in text.splitlines() if line.startswith(("   1", "   2", "   3", "plan "))]
    assert len(table) >= 4 and max(map(len, table)) <= 80


def test_plan_prints_ranked_plans_as_json(capsys):
    plans = json.loads(said(capsys, "--model", MODELS / "qwen2.5-math-7b", "--gpus", 8, "--sequence-tokens", 4096, "--json", *SMALL))
    seconds = [plan["response_s"] for plan in plans]
    assert len(plans) == 3 and seconds[0] <= 1.01 * seconds[-1]
    assert {"parallel", "rollout", "window_tokens", "recompute", "step_s"} <= plans[0].keys()


def test_written_recipe_equals_the_plan_and_is_minimal(capsys, tmp_path):
    written = tmp_path / "recipe.yaml"
    words = ("--model", MODELS / "qwen3-4b", "--gpus", 8, "--write", written, "--choose", 2, "run.num_steps=7", *SMALL)
    plan = json.loads(said(capsys, *words, "--json"))[1]
    config = load_config(written)
    for name, value in plan["parallel"].items():
        assert getattr(config.parallel, name) == value
    assert (config.rollout.num_servers, config.batch.window_tokens) == (plan["rollout"]["num_servers"], plan["window_tokens"])
    assert config.run.num_steps == 7 and config.policy.path == str(MODELS / "qwen3-4b")
    text = yaml.safe_load(written.read_text())
    assert text["preset"] == "tppo" and "algorithm" not in text and len(str(text)) < len(str(to_yaml_values(Config()))) / 4


def test_written_recipe_passes_the_dry_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = make_tiny_model(tmp_path / "model", num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=4096)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    said(capsys, "--model", model, "--gpus", 4, "--sequence-tokens", 1024, "--slots", 64, "--write", "recipe.yaml")
    assert main(["train", "--config", "recipe.yaml", "--dry-run", "--gpus-per-node", "4"]) == 0
    assert "nothing was started" in capsys.readouterr().out


def test_lengths_from_a_file_change_the_plan(capsys, tmp_path):
    (tmp_path / "lengths.txt").write_text("\n".join(["900"] * 50))
    words = ("--model", MODELS / "qwen3-4b", "--gpus", 8, "--json", *SMALL)
    short = json.loads(said(capsys, *words, "--lengths", tmp_path / "lengths.txt"))[0]
    assert short["response_s"] < json.loads(said(capsys, *words))[0]["response_s"]


def test_plan_accepts_keys_on_both_sides_of_options(capsys):
    model = ("--model", MODELS / "qwen3-4b")
    plans = said(capsys, "policy.recompute=full", *model, "rollout.placement=colocated", "--gpus", 8, "--json", *SMALL)
    assert {plan["recompute"] for plan in json.loads(plans)} == {"full"}


def gpu_file(folder, *, hbm_bytes, per_machine):
    (folder / "gpus.yaml").write_text(
        f"MINE:\n  source: mine\n  flops: {{bfloat16: 1.0e+15}}\n  hbm_bytes: {hbm_bytes}\n  hbm_bandwidth: 3.0e+12\n"
        f"  nvlink_bandwidth: 4.0e+11\n  nic_bandwidth: 5.0e+10\n  per_machine: {per_machine}\n"
    )
    return folder / "gpus.yaml"


def test_plan_reads_gpus_from_a_user_file(capsys, tmp_path):
    words = ("--model", MODELS / "qwen3-4b", "--gpus", 4, "--gpu-file", gpu_file(tmp_path, hbm_bytes=80e9, per_machine=4), *SMALL)
    assert "on 4 mine" in said(capsys, *words, "--gpu", "mine")
    assert "'H100-80G' is not described in" in refused(capsys, *words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--gpus", "8", "--gpu", "h900"], "GPU 'h900' is not described"),
        (["--gpus", "20"], "expected whole nodes of 8 H100-80G, 16 or 24"),
        (["--gpus", "8", "--slots", "17"], "expected a multiple of batch.num_samples_per_prompt=16"),
        (["--gpus", "8", "--preset", "nope"], "preset"),
        (["--gpus", "8", "--windows", "99999999"], "longer than the longest response"),
        (["--gpus", "8", "--preset", "ppo", "--windows", "64"], "schedule.mode=sync generates whole responses"),
        (["--gpus", "8", "--lengths", "gauss:mean=3"], "neither a distribution nor a file"),
        (["--gpus", "8", "--choose", "99", *SMALL, *FEW_PLANS], "expected a number up to"),
        (["--gpus", "8", "rollout.server_args.mem-fraction-static=7"], "mem-fraction-static: expected a number"),
        (["--gpus", "8", "parallel.tensor_paralel_size=2"], "unknown key"),
    ],
)
def test_plan_rejects_bad_arguments_with_a_message(capsys, words, expected):
    assert expected in refused(capsys, "--model", MODELS / "qwen3-4b", *words)


def test_plan_rejects_unsupported_models_with_the_reason(capsys, tmp_path):
    assert "expected a folder with a model's config.json" in refused(capsys, "--model", tmp_path / "no", "--gpus", 8)
    assert "expected --model CONFIG" in refused(capsys, "--gpus", 8)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert "model_type 'bert' is not supported; supported are" in refused(capsys, "--model", tmp_path / "config.json", "--gpus", 8)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert "config.json lacks" in refused(capsys, "--model", tmp_path, "--gpus", 8)
    make_tiny_model(tmp_path / "short", max_position_embeddings=512)
    assert "plan with --sequence-tokens 512" in refused(capsys, "--model", tmp_path / "short", "--gpus", 8)


def test_plan_reports_the_fewest_gpus_for_a_model_that_does_not_fit(capsys, tmp_path):
    said_32b = refused(capsys, "--model", MODELS / "qwen2.5-32b", "--gpus", 4, "rollout.placement=colocated")
    for words in ("not enough memory in the stage", "nearest:", "the smallest number of H100-80G with a layout that fits:"):
        assert words in said_32b
    tiny = ("--gpu", "mine", "--gpu-file", gpu_file(tmp_path, hbm_bytes=8e9, per_machine=8))
    deepseek = refused(capsys, "--model", MODELS / "deepseek-v3", "--gpus", 512, *tiny)
    assert "no number of mine is enough: a server spans at most 8 nodes of 8" in deepseek
    assert "7 h100-80g" in refused(capsys, "--model", MODELS / "qwen3-30b-a3b", "--gpus", 7, "--gpu", "h100-80g")


def test_plan_serves_a_large_model_over_several_nodes(capsys):
    plan = said(capsys, "--model", MODELS / "deepseek-v3", "--gpus", 256, "--gpu", "h200", "--windows", 1024, *SMALL)
    assert "8 x tp16" in plan and "ROLLOUT_NODES=16 SERVER_NODES=2 sbatch --nodes 32" in plan


def test_a_refusal_names_the_changes_that_help(capsys):
    words = ("rollout.placement=colocated", "parallel.tensor_parallel_size=1", "parallel.pipeline_parallel_size=1")
    text = refused(capsys, "--model", MODELS / "qwen2.5-32b", "--gpus", 16, *words)
    assert "16 H100-80G are enough with: parallel.tensor_parallel_size not given" in text
    assert "schedule.mode=sync or async" in text and "rollout.placement=disaggregated" in text


def test_a_plan_shows_the_limit_other_schedules_and_the_cost_of_the_run(capsys, tmp_path):
    written = tmp_path / "mine.yaml"
    words = ("--gpus", 8, "--sequence-tokens", 4096, "--windows", 1024, "run.num_steps=36", "--write", written, "--schedules", *SMALL)
    text = said(capsys, "--model", MODELS / "qwen2.5-math-7b", *words)
    for word in ("times the limit", "36 steps: ", "GPU-hours", "algorithm.correction.old_policy=rollout", "schedule.mode=async"):
        assert word in text
    assert f"megatron-rl train --config {written}" in text and "RECIPE" not in text + written.read_text()
    pinned = said(capsys, "--model", MODELS / "qwen2.5-math-7b", "schedule.mode=tppo", *words)
    assert "schedule.mode=async" not in pinned.partition("not looked at")[0]


def test_pinned_keys_stay_pinned(capsys):
    words = ("parallel.pipeline_parallel_size=7", "--gpus", 32, "--json", *SMALL)
    for plan in json.loads(said(capsys, "--model", MODELS / "qwen2.5-math-7b", *words)):
        assert plan["parallel"]["pipeline_parallel_size"] == 7
    nested = ("parallel={pipeline_parallel_size: 3, pipeline_layers: [9, 10, 9]}", "--gpus", 6, "--json", *SMALL)
    for plan in json.loads(said(capsys, "--model", MODELS / "qwen2.5-math-7b", *nested)):
        assert plan["parallel"]["pipeline_layers"] == [9, 10, 9]


def test_planning_a_thousand_gpus_takes_seconds(capsys):
    begin = time.process_time()
    said(capsys, "--model", MODELS / "qwen3-235b-a22b", "--gpus", 1024)
    assert time.process_time() - begin < 20  # seconds on shared cores; below 10 on idle ones


def test_plan_never_replaces_the_given_recipe(capsys, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("run: {num_steps: 3}  # a comment\n")
    for words in ((recipe, "--write", recipe), ("--config", recipe, "--write", f"{tmp_path}/./recipe.yaml")):
        assert "it is the given recipe; name a new file" in refused(capsys, "--gpus", 8, *words)
    assert "it is a folder" in refused(capsys, "--gpus", 8, recipe, "--write", tmp_path)
    assert recipe.read_text().endswith("# a comment\n")
