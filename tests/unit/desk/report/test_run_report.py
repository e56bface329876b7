"""The report's page of one run."""

import re

from megatron_rl.cli import main
from megatron_rl.desk.report.health_checks import health_checks
from megatron_rl.desk.report.run_record import load_run
from megatron_rl.desk.report.run_report import write_report
from megatron_rl.tracking.metrics_file import MetricsWriter
from megatron_rl.tracking.timeline import Span, Timeline
from tests.unit.desk.report.written_runs import record, text_of, write_run


def test_report_shows_lengths_ranks_memory_and_idle_times(tmp_path):
    words = text_of(write_report(write_run(tmp_path / "run")).read_text())
    for text in ("Lengths", "median 16.5", "update_policy: rank 0 takes", "at most 3.25 GiB, update_policy"):
        assert text in words, text
    assert "median: servers 25 %, trainer 50 %" in words
    # Rank 0 takes 4.5 s on average, ranks 1 and 7 take 1.5 and 2.5.
    assert f"{4.5 / ((4.5 + 1.5 + 2.5) / 3) - 1:.0%} more than the mean" in words


def test_report_command_writes_to_its_output_path(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert main(["report", str(run), "--output", str(tmp_path / "else.html")]) == 0
    assert (tmp_path / "else.html").is_file() and not (run / "report.html").exists()
    assert capsys.readouterr().out.strip() == str(tmp_path / "else.html")


def test_timeline_omits_the_pause_before_a_resume(tmp_path):
    folder = write_run(tmp_path / "run", num_steps=4)
    later = [Span("generate", "rollout", 5000.0 + 10 * step, 5002.0 + 10 * step, step) for step in (5, 6)]
    Timeline(spans=[*load_run(folder).spans, *later]).write(folder / "timeline.json")
    picture = write_report(folder).read_text().split("A few steps in detail")[1]
    assert "generate 5" in picture and "generate 4" not in picture


def test_report_is_self_contained_and_omits_missing_panels(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step in range(1, 9):
            writer.log(step, {"reward/mean": step / 10, "eval/accuracy": step / 10, "step/time_s": 1.0})
    page = write_report(tmp_path).read_text()
    assert "<script src" not in page and "http://" not in page.replace("http://www.w3.org", "")
    assert "80.0" in page and "svg" in page
    assert "Evaluation by set" not in page and "Best of k" not in page


def test_report_draws_evaluation_sets_and_best_of_k_with_standard_errors(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step in range(1, 4):
            numbers = {f"eval/{name}accuracy{what}": 0.3 for name in ("", "aime/", "math/") for what in ("", "_stderr")}
            writer.log(step, numbers | {f"eval/pass@{k}": k / 10 for k in (1, 2, 4)})
    page = write_report(tmp_path).read_text()
    assert "Evaluation by set" in page and "Best of k" in page and "aime" in page and "pass@4" in page
    assert "30.0% ± 30.0%" in page


def test_corner_of_a_card_shows_a_mean_of_the_newest_steps(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step in range(1, 41):
            writer.log(step, {"step/tokens_per_s": 1000.0 if step < 40 else 100.0, "eval/accuracy": 0.5 if step < 40 else 0.25})
    words = text_of(write_report(tmp_path).read_text())
    throughput = words.split("Throughput")[1].split("Generated tokens")[0]
    assert "(mean of 5 steps)" in throughput and 600 < float(throughput.split()[0]) < 800
    assert "25 % at step 40" in words  # an evaluation is a point of its own


def test_page_fits_a_phone_and_a_sheet_of_paper(tmp_path):
    style = write_report(write_run(tmp_path / "run")).read_text().split("<style>")[1].split("</style>")[0]
    rules = dict(re.findall(r"^([^@{}]+?) {([^}]*)}", style, re.MULTILINE))
    assert "nowrap" not in rules[".panel .latest"] and "nowrap" not in rules[".tile b"] and "wrap" in rules[".panel header"]
    printed = style.split("@media print {")[1]
    assert re.search(r"\.panel[^{]*{ break-inside: avoid; }", printed) and "min-width: 0" in printed
    assert "@media screen and (prefers-color-scheme: dark)" in style  # paper is white
    # Rows of three that would end with a single card end with two rows of two.
    assert ".panel:nth-child(3n+1):nth-last-child(4) ~ .panel" in style


def test_reward_is_judged_only_over_steps_in_which_the_policy_trains():
    flat = [{"reward/mean": 0.5} for _ in range(20)]
    rising = [{"reward/mean": 0.5 + step / 100, "policy/grad_norm": 1.0} for step in range(20)]
    falling = [{"reward/mean": 0.9 - step / 100} for step in range(20)]
    still = [{**metrics, "policy/grad_norm": 1.0} for metrics in flat]
    titles = [health_checks(record(*steps))[0].title for steps in (flat, rising, falling + rising, still)]
    assert titles == ["Reward", "Reward rises", "Reward rises", "Reward does not rise"]
