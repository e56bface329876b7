"""`megatron-rl simulate` as a user types it."""

import json
import subprocess
import sys

import pytest

from megatron_rl.cli import main
from megatron_rl.tracking.timeline import read_timeline
from tests.unit.desk.simulate.made_runs import make_config, make_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("made") / "run", make_config(num_prompts=16), num_steps=30)


def numbers(capsys, *words):
    assert main(["simulate", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_simulation_shows_real_seconds_only_for_the_same_configuration(folder, capsys):
    own = numbers(capsys, "--run", folder)
    assert own["simulated"]["step_s"] == pytest.approx(own["real"]["step_s"], rel=0.08)
    other = numbers(capsys, "--run", folder, "batch.window_tokens=300", "--steps", 60)
    assert other["real"] is None
    assert other["simulated"]["step_s"] > 1.2 * own["simulated"]["step_s"]
    assert other["simulated"]["unfinished_share"] < own["simulated"]["unfinished_share"]


def test_same_seed_gives_the_same_simulation(folder, capsys):
    words = ("--run", folder, "schedule.mode=sync", "--steps", 20, "--seed")
    first, again, other = (numbers(capsys, *words, seed) for seed in (1, 1, 2))
    assert first == again != other


def test_replay_prints_both_errors(folder, capsys):
    found = numbers(capsys, "--run", folder, "--replay")
    measured, fitted = found.values()
    assert abs(measured["error"]) < 0.01 and abs(fitted["error"]) < 0.03


def test_windows_option_compares_with_sync(folder, capsys):
    found = numbers(capsys, "--run", folder, "--windows", 96, 300, "--steps", 40)
    assert list(found) == ["sync", "96", "300"]
    assert found["96"]["prefix_share"] > found["300"]["prefix_share"] > found["sync"]["prefix_share"] == 0


def test_an_override_may_follow_the_windows(folder, capsys):
    words = ("--run", folder, "--steps", 40, "--windows", 96)
    changed = numbers(capsys, *words, "batch.num_prompts_per_step=32")
    assert changed == numbers(capsys, "batch.num_prompts_per_step=32", *words) != numbers(capsys, *words)


def test_windows_of_a_recipe_without_a_critic_are_those_of_the_recipe_with_that_window(tmp_path, capsys):
    """In windows and without a critic whole groups train, also where the recipe that is compared generates full responses."""
    costs = tmp_path / "costs.yaml"
    costs.write_text("{prefill: {token_s: 2.0e-6}, stages: {old_logprobs: {token_s: 1.0e-5}, update_policy: {token_s: 3.0e-5}}}")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{preset: grpo, batch: {num_prompts_per_step: 16, max_response_tokens: 8192}}")
    words = [recipe, "--timing", costs, "--steps", 40]
    words += ["--lengths", "lognormal:median=1500,sigma=0.9,max=8192"]
    compared = numbers(capsys, *words, "--windows", 1024)
    as_recipe = numbers(capsys, *words, "schedule.mode=tppo", "batch.window_tokens=1024")
    assert compared["1,024"] == as_recipe["simulated"]
    assert compared["sync"] == numbers(capsys, *words)["simulated"]


def test_stages_without_costs_are_named(folder, capsys, tmp_path):
    costs = tmp_path / "costs.yaml"
    costs.write_text("stages: {update_policy: {token_s: 3.0e-5}}")
    assert main(["simulate", "--run", str(folder), "--timing", str(costs), "--steps", "12"]) == 0
    text = capsys.readouterr().out.replace("\n", " ")
    assert "--timing has no costs of score, values" in text and "update_policy" not in text.partition("these stages take")[0]


def test_a_cost_of_an_unknown_stage_is_refused(folder, capsys, tmp_path):
    costs = tmp_path / "costs.yaml"
    costs.write_text("stages: {rerank: {token_s: 3.0e-5}}")
    assert main(["simulate", "--run", str(folder), "--timing", str(costs)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "no stage is called 'rerank'" in error and "generate, sleep, score" in error


def test_windows_ahead_on_shared_devices_are_refused(folder, capsys):
    words = ["schedule.mode=async", "rollout.placement=colocated"]
    assert main(["simulate", "--run", str(folder), *words]) == 2
    assert "schedule.mode: async generates while the trainer trains" in capsys.readouterr().err


def test_costs_and_lengths_of_files_need_no_run_and_a_trace_opens(folder, capsys, tmp_path):
    costs, trace, recipe = tmp_path / "costs.yaml", tmp_path / "trace.json", folder / "config.yaml"
    main(["simulate", "--run", str(folder), "--save-timing", str(costs), "--steps", "30"])
    capsys.readouterr()
    found = numbers(
        capsys, recipe, "--timing", costs, "--lengths", "fixed:length=90", "--steps", 12, "--trace", trace,
        "--responses", 10_000,
    )  # fmt: skip
    assert found["simulated"]["finished_per_s"] > 0 and found["seconds_until"]["responses"] > 10
    spans = read_timeline(trace)
    assert {span.lane for span in spans} == {"rollout", "trainer", "host"} and max(span.step for span in spans) == 12


def test_simulation_table_names_the_scenario(folder, capsys):
    assert main(["simulate", "--run", str(folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("tppo, 64 slots on 1 server(s)", "seconds per step", "real", "error", "trainer idle"):
        assert words in shown


def test_overlap_guess_from_a_synchronous_run_is_reported(tmp_path, capsys):
    sync = make_run(tmp_path / "sync", make_config("sync", num_prompts=8), num_steps=12)
    words = ["simulate", "--run", str(sync), "--steps", "20"]
    assert main([*words, "schedule.mode=tppo", "batch.window_tokens=96"]) == 0
    assert "no stages overlapped in the run" in capsys.readouterr().out
    assert main(words) == 0
    assert "no stages overlapped" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected a recipe"),
        (["RUN/config.yaml"], "expected --run RUN, --timing FILE or --gpu NAME"),
        (["--replay"], "expected --run RUN, the run to replay"),
        (["--run", "/nowhere"], "expected the output folder of a run"),
        (["--run", "RUN", "--lengths", "gauss:mean=3"], "neither a distribution nor a file"),
        (["--run", "RUN", "--windows", "5000"], "longer than the longest response (batch.max_response_tokens=900)"),
        (["--run", "RUN", "batch.window_token=5"], "batch.window_token"),
        (["--run", "RUN", "algorithm.dynamic_sampling.enabled=true"], "depends on rewards"),
        (["--run", "RUN", "batch.window_tokens=5000"], "batch.window_tokens=5000 is longer than the longest response"),
        (["RUN/config.yaml", "--gpu", "H100-80G", "--lengths", "fixed:length=9"], "parallel.num_ranks=0"),
        (["--run", "RUN", "batch.num_prompts_per_step=0"], "batch.num_prompts_per_step"),
    ],
)
def test_simulate_rejects_bad_arguments_with_a_message(folder, capsys, words, said):
    assert (
        main(["simulate", *(word.replace("RUN", str(folder), 1) if word.startswith("RUN") else word for word in words)])
        == 2
    )
    assert said in capsys.readouterr().err


def test_simulate_imports_neither_megatron_nor_sglang(folder):
    code = (
        "import sys; from megatron_rl.cli import main; main(sys.argv[1:]); "
        "sys.exit(bool({'megatron', 'sglang'} & set(sys.modules)))"
    )
    words = ["simulate", "--run", str(folder), "--steps", "12"]
    assert subprocess.run([sys.executable, "-c", code, *words], capture_output=True, check=False).returncode == 0
