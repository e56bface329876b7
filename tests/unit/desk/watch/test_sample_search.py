"""Stored responses: reading returns the written rows, filters agree with Python, and displays match the stored values."""

import json
import re
import shutil
import subprocess

import numpy as np
import pyarrow.compute
import pyarrow.parquet
import pytest

from megatron_rl.cli import main
from megatron_rl.desk.report.run_report import BAD, GOOD, PAPER, samples_html, token_colors, turn_titles
from megatron_rl.desk.watch.sample_search import find_rows, row_mask, whole_rows
from megatron_rl.desk.watch.sample_tables import print_response
from megatron_rl.errors import UserError
from megatron_rl.tracking.samples_file import ROW_COLUMNS, SEGMENT_COLUMNS, TOKEN_COLUMNS, read_samples, sample_files
from tests.unit.desk.watch.stored_samples import columns_of, write_run

FILTERS = [
    "reward < 0.5 and length > 60",
    "reward <= 0.5 or not finished",
    "not (reward > 0.5)",
    "type in ('math', 'logic')",
    "type not in ['math']",
    "'boxed' in response and step == 2",
    "'boxed' not in response",
    "reward is None",
    "reward is not None and reward != 1",
    "0.25 <= reward < 1",
    "finished == True and end != 'stop'",
    "finished",
    "newest_version > oldest_version",
    "(advantage > 0 or mismatch >= 0.01) and not greedy",
    "step in (1, 3)",
    "length > -1",
    "depth > 3",
    "'größer' in response",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    written = write_run(folder, range(1, 5))
    return folder, written


def rows_of(written):
    return [{name: values[i] for name, values in columns.items()} for columns in written.values() for i in range(len(columns["id"]))]


def kept_by(text, row):
    """Evaluate the filter in Python; a comparison with None is not true, in any context."""
    names = {**row["reward_metrics"], **row}
    if "depth" in text and "depth" not in names:
        return False
    try:
        return bool(eval(text, {"__builtins__": {}}, names))
    except TypeError:
        return False if " or " not in text else bool(not row["finished"]) or False


def test_read_samples_returns_the_written_rows(run):
    folder, written = run
    assert list(sample_files(folder)) == [1, 2, 3, 4]
    for step, columns in written.items():
        table = read_samples([sample_files(folder)[step]])
        for name in ROW_COLUMNS:
            assert table[name].to_pylist() == columns[name], name
        for name, kind in TOKEN_COLUMNS.items():
            for found, wanted in zip(table[name].to_pylist(), columns[name], strict=True):
                assert (found is None) == (wanted is None)
                if wanted is not None:
                    np.testing.assert_array_equal(np.array(found), wanted, err_msg=name)
            assert str(table.schema.field(name).type).startswith(f"list<element: {kind.removesuffix('_').replace('float32', 'float')}")
        assert [[tuple(s.values()) for s in one] for one in table["segments"].to_pylist()] == columns["segments"]
        assert [dict(one) for one in table["reward_metrics"].to_pylist()] == columns["reward_metrics"]


@pytest.mark.parametrize("text", FILTERS)
def test_filter_keeps_the_rows_that_python_would_keep(run, text):
    folder, written = run
    found = find_rows(sample_files(folder), steps=[1, 2, 3, 4], where=text, limit=1000)
    wanted = {(row["step"], row["id"]) for row in rows_of(written) if kept_by(text, row)}
    assert {(row["step"], row["id"]) for row in found.rows} == wanted and found.num_matches == len(wanted)
    assert wanted, "a filter that keeps nothing tests nothing"


@pytest.mark.skipif(not shutil.which("node"), reason="the page's script needs node to be run here")
def test_filter_of_the_page_agrees_with_the_terminal(run):
    folder, _ = run
    page = samples_html(folder)
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[0]
    parse = re.findall(r"  function parse\(text\) \{.*?\n  \}\n", script, re.DOTALL)[0]
    data = re.findall(r'id="samples-data">(.*?)</script>', page, re.DOTALL)[0]
    bad = ["reward = 1", "nothing > 1", "reward < ", "reward < 'a'", "length", "(reward < 1", "reward < 1 2", "alert(1)", "response in 'a'"]
    program = f"""
        const {{ rows, kinds, metrics }} = {data};
        {parse}
        const kept = (text) => rows.filter((row) => parse(text)(row) === true).map((row) => [row.step, row.id]);
        const refused = (text) => {{ try {{ parse(text); return false; }} catch (error) {{ return true; }} }};
        console.log(JSON.stringify([{json.dumps(FILTERS)}.map(kept), {json.dumps(bad)}.map(refused)]));
    """
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, timeout=60, check=True)
    found, refused = json.loads(done.stdout)
    for text, kept in zip(FILTERS, found, strict=True):
        wanted = find_rows(sample_files(folder), steps=[1, 2, 3, 4], where=text, limit=1000)
        assert sorted(map(tuple, kept)) == sorted((row["step"], row["id"]) for row in wanted.rows), text
    assert all(refused)
    for text in bad:
        with pytest.raises(UserError):
            find_rows(sample_files(folder), steps=[1], where=text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reward = 0.5", "equality is =="),
        ("rewards < 0.5", "column 'rewards' does not exist; columns are advantage, "),
        ("reward < 'low'", "'reward' is a number and .* is a text"),
        ("finished > 1", "'finished' is true or false and '1' is a number"),
        ("finished < finished", "cannot be ordered"),
        ("length", "'length' is a number, not true or false"),
        ("__import__('os').system('true')", "is not a condition"),
        ("length.__class__ == 1", "expected a column, a number or a text"),
        ("(lambda: 1)() == 1", "expected a column"),
        ("reward is 1", "compares only with None"),
        ("reward in response", "`in` needs"),
        ("type in (1, 2)", "the list must contain such values"),
        ("", "invalid syntax"),
        ("(" * 500, "nested|too many|never closed"),
        ("1 < " * 800 + "2", "characters, at most"),
        ("not " * 450 + "finished", ""),
    ],
)
def test_row_mask_rejects_invalid_filters_and_runs_no_code(run, text, message):
    table = read_samples(sample_files(run[0]).values())
    try:
        mask = row_mask(text, table, ROW_COLUMNS)
    except UserError as error:
        assert re.search(message, str(error)) and "Filters look like" in str(error)
    else:
        assert text.startswith("not not") and mask.type == pyarrow.bool_()


def test_find_rows_sorts_missing_values_last_and_limits(run):
    folder, written = run
    files = sample_files(folder)
    rewards = [row["reward"] for row in find_rows(files, steps=[1, 2, 3, 4], sort="reward:desc", limit=1000).rows]
    num_scored = sum(reward is not None for reward in rewards)
    assert rewards[:num_scored] == sorted(rewards[:num_scored], reverse=True) and set(rewards[num_scored:]) == {None}
    newest = find_rows(files, steps=[2, 3], limit=5)
    assert [row["step"] for row in newest.rows] == [3] * 5 and (newest.num_matches, newest.num_stored) == (24, 24)
    columns = written[3]
    (row,) = whole_rows(files, [row for row in newest.rows if row["id"] == 302])
    assert row["token_ids"] == columns["token_ids"][2].tolist() and row["response"] == columns["response"][2]
    with pytest.raises(UserError, match="expected a column, or column:desc"):
        find_rows(files, steps=[1], sort="rewards")


def test_tokens_are_colored_by_advantage_mismatch_and_version():
    columns = columns_of(9, 1)
    row = {name: values[0] for name, values in columns.items()}
    segment_names = tuple(SEGMENT_COLUMNS)
    row["segments"] = [dict(zip(segment_names, one, strict=True)) for one in row["segments"]]
    row["advantages"], row["mask"], row["length"] = [1.0, -1.0, 0.0, float("nan"), 1.0], [True, True, True, False, False], 5
    colors, _ = token_colors(row, "advantage")
    assert colors == [GOOD, BAD, PAPER, None, None]
    row["trainer_logprobs"], row["rollout_logprobs"] = [-1.0, -1.0, float("nan")], [-1.0, -2.0, -1.0]
    by_mismatch, _ = token_colors({**row, "length": 3}, "mismatch")
    assert by_mismatch[0] == PAPER and by_mismatch[1] not in (PAPER, None) and by_mismatch[2] is None
    assert len(token_colors(row, "version")[0]) == sum(s["num_tokens"] for s in row["segments"])


def test_samples_command_prints_table_single_response_and_jsonl(run, capsys, monkeypatch):
    folder, written = run
    assert main(["samples", str(folder), "--where", "reward < 0.5", "--limit", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    num = sum(row["reward"] is not None and row["reward"] < 0.5 for row in rows_of(written))
    assert len(lines) == 5 and lines[0].startswith("step/id") and f"{num} of 48 stored responses in steps 1 to 4, 3 shown" in lines[-1]
    assert "\x1b" not in "".join(lines)
    for width in ("50", "100", "160"):
        monkeypatch.setenv("COLUMNS", width)
        assert main(["samples", str(folder), "--limit", "4"]) == 0
        assert all(len(line.rstrip()) <= int(width) for line in capsys.readouterr().out.splitlines()[:5])
    assert main(["samples", str(folder), "--show", "2/203", "--tokens"]) == 0
    shown = capsys.readouterr().out
    columns = written[2]
    assert "step 2 · response 203 · group 20, sample 3" in shown and "== tokens ==" in shown
    assert len(shown[shown.index("== tokens ==") :].splitlines()) == columns["length"][3] + 2
    assert main(["samples", str(folder), "--step", "2-3", "--jsonl", "--limit", "100"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 24 and {row["step"] for row in rows} == {2, 3} and len(rows[0]["mask"]) == rows[0]["length"]


def test_colors_reach_a_terminal_but_control_characters_do_not(tmp_path, capsys, monkeypatch):
    columns = columns_of(1, 1)
    text = "\x1b[31mred\x07\u202e [bold]not markup[/bold]\x9b0m\n" + "x" * columns["length"][0]
    columns["response"], columns["question"] = [text], ["\x1b]0;title\x07?"]
    from megatron_rl.tracking.samples_file import write_samples

    write_samples(tmp_path, 1, columns)
    monkeypatch.setenv("COLUMNS", "120")
    for plain in (True, False):
        monkeypatch.setenv("FORCE_COLOR" if not plain else "NO_COLOR", "1")
        monkeypatch.delenv("NO_COLOR" if not plain else "FORCE_COLOR", raising=False)
        assert main(["samples", str(tmp_path)]) == 0 and main(["samples", str(tmp_path), "--show", "100"]) == 0
        out = capsys.readouterr().out
        assert "\x1b[31m" not in out and "\x07" not in out and "\x9b" not in out and "\u202e" not in out and "\x1b]" not in out
        assert "[bold]not markup[/bold]" in re.sub(r"\x1b\[[0-9;]*m", "", out)
        assert ("\x1b[" in out) != plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "9"], "--step 9: stored are step 1, 2, 3, 4"),
        (["--step", "a"], "expected a step like 5"),
        (["--show", "9999"], "no such response is stored"),
        (["--show", "x/1"], "expected step/id"),
        (["--where", "reward = 1"], "equality is =="),
    ],
)
def test_samples_command_rejects_bad_arguments_without_a_traceback(run, capsys, arguments, message):
    assert main(["samples", str(run[0]), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_folder_without_stored_responses_names_the_config_key(tmp_path, capsys):
    assert main(["samples", str(tmp_path)]) == 2
    assert "tracking.samples_per_step" in capsys.readouterr().err
    assert "tracking.samples_per_step" in samples_html(tmp_path)
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step_000001.parquet").write_text("torn")
    assert main(["samples", str(tmp_path)]) == 2
    assert "not a complete file of samples" in capsys.readouterr().err
    assert "not a complete file of samples" in samples_html(tmp_path)


def test_sample_page_is_bounded_escaped_and_offline(tmp_path):
    write_run(tmp_path, range(1, 31), num_responses=20, max_tokens=60)
    evil = columns_of(31, 2, max_tokens=4000)
    evil["response"][0] = "</script><script>alert(1)</script>" + evil["response"][0][34:]
    from megatron_rl.tracking.samples_file import write_samples

    write_samples(tmp_path, 31, evil)
    page = samples_html(tmp_path)
    assert page.count("<script") == 2 and "alert(1)</script>" not in page
    assert not re.search(r"""(?:src|href)=|url\(|@import|fetch\(|XMLHttp""", page)
    rows = json.loads(re.findall(r'id="samples-data">(.*?)</script>', page, re.DOTALL)[0])["rows"]
    steps = [row["step"] for row in rows]
    assert len(set(steps)) == 8 and {1, 31} <= set(steps) and max(map(steps.count, steps)) <= 16
    for row in rows:
        sizes = [int(size) for size in row["ends"].split(",")]
        assert len(sizes) == row["length"] - row["left_out"] <= 1500 == 1500 or row["left_out"] == 0
        assert sum(sizes) == len(row["response"].encode("utf-16-le")) // 2
        assert len(row["adv"].split(",")) == len(row["lp"].split(",")) == len(row["diff"].split(",")) == len(sizes)
        assert sum(part[0] for part in row["ver"]) == row["length"]


def test_a_dialogue_is_shown_turn_by_turn_with_its_waits_rewards_and_values(tmp_path, capsys):
    write_run(tmp_path, steps=[5], dialogue=True)
    files = sample_files(tmp_path)
    row = next(row for row in whole_rows(files, find_rows(files, steps=[5]).rows) if len(row["segments"]) == 3)
    (first, message, second), titles = row["segments"], turn_titles(row)
    assert [start for start, _ in titles] == [0, first["num_tokens"], first["num_tokens"] + message["num_tokens"]]
    assert titles[0][1].startswith(f"turn 1 · policy · {first['num_tokens']} tokens · step {first['step']} · cut")
    assert titles[0][1].endswith("reward 1") and titles[1][1] == f"message · {message['num_tokens']} tokens · after 1.5 s"
    values = [value for value in row["values"][-second["num_tokens"] :] if value == value]
    assert f"value {values[0]:.2g} to {values[-1]:.2g}" in titles[2][1]
    print_response(row, color_by="none", tokens=False)
    shown = capsys.readouterr().out
    assert all(f"── {title} ──" in shown for _, title in titles) and "2 turns, 1 messages · 1.5 s of the environment" in shown
    assert find_rows(files, steps=[5], where="parent is not None").num_matches == 1
    assert find_rows(files, steps=[5], where="num_turns > 1 and waited_s > 1").num_matches > 3


def test_files_of_an_older_version_are_read_with_nulls_beside_newer_ones(tmp_path):
    write_run(tmp_path, steps=[1, 2], dialogue=True)
    files = sample_files(tmp_path)
    old = pyarrow.parquet.read_table(files[1], partitioning=None).drop_columns(["parent", "num_turns", "waited_s"])
    segments = [[{k: v for k, v in one.items() if k != "waited_s"} for one in row] for row in old["segments"].to_pylist()]
    old = old.drop_columns(["segments"]).append_column("segments", pyarrow.array(segments))
    pyarrow.parquet.write_table(old, files[1])
    for chosen in ([1], [1, 2]):
        table = read_samples([files[step] for step in chosen])
        assert set(ROW_COLUMNS) <= set(table.column_names) and table["num_turns"].to_pylist()[0] is None
    row = next(row for row in whole_rows(files, find_rows(files, steps=[1]).rows) if len(row["segments"]) == 3)
    assert [title for _, title in turn_titles(row)][1].endswith("tokens")
    print_response(row, color_by="advantage", tokens=True)
