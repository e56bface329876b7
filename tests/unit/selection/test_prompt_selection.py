"""`megatron-rl select-prompts` on files, and generation with a fake server: output, resuming, rejected inputs."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.cli import main
from megatron_rl.data.trajectory import Prompt, Score
from megatron_rl.errors import UserError
from megatron_rl.rewards.registry import RewardError
from megatron_rl.rollout.generation import Sampling, sample_seed
from megatron_rl.rollout.requests import Generation
from megatron_rl.selection.scores import SamplingPlan, generate_scores, open_score_file

NUM_EACH = 30


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture
def folder(tmp_path):
    prompts = [
        {"id": f"{name}{i:02d}", "prompt": f"{i}+1=", "answer": i + 1, "type": name, "note": {"deep": i}}
        for name in ("math", "code")
        for i in range(NUM_EACH)
    ]
    write_rows(tmp_path / "prompts.jsonl", prompts)
    scores = [
        {"id": row["id"], "score": i / NUM_EACH + (10 if row["type"] == "code" else 0), "response": "x", "answer": "y"}
        for row in prompts
        for i in [row["note"]["deep"]]
    ]
    random.Random(0).shuffle(scores)
    write_rows(tmp_path / "scores.jsonl", scores)
    recipe = f"data: {{train_files: [{tmp_path}/prompts.jsonl]}}\nrun: {{output_dir: {tmp_path}/out}}\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    return tmp_path


def run(folder, *overrides):
    arguments = [f"select_prompts.output_path={folder}/kept.jsonl", f"select_prompts.scores_path={folder}/scores.jsonl"]
    return main(["select-prompts", "--config", str(folder / "recipe.yaml"), *arguments, *overrides])


def test_selection_keeps_the_lowest_tenth_of_each_type(folder, capsys):
    assert run(folder) == 0
    rows = read(folder / "prompts.jsonl")
    assert read(folder / "kept.jsonl") == [row for row in rows if row["note"]["deep"] < 3]
    report = json.loads((folder / "kept.report.json").read_text())
    assert report["num_kept"] == 6
    assert [(t["type"], t["num_kept"], sum(t["dropped"].values())) for t in report["types"]] == [
        ("code", 3, 27),
        ("math", 3, 27),
    ]
    verdicts = read(folder / "kept.verdicts.jsonl")
    assert [v["id"] for v in verdicts] == [row["id"] for row in rows]
    assert sum(v["kept"] for v in verdicts) == 6 and verdicts[0]["z"] < -1.5
    text = (folder / "kept.report.md").read_text()
    assert "| math | not in the lowest share of its type | 27 |" in text and "keep_share" in text
    assert "not in the lowest share" in capsys.readouterr().out


def test_selection_output_is_deterministic(folder):
    assert run(folder) == 0
    names = ("kept.jsonl", "kept.report.md", "kept.report.json", "kept.verdicts.jsonl")
    first = [(folder / name).read_bytes() for name in names]
    scores = read(folder / "scores.jsonl")
    write_rows(folder / "scores.jsonl", scores[::-1])
    assert run(folder) == 0
    assert [(folder / name).read_bytes() for name in names] == first


def test_kept_rows_load_as_training_prompts(folder):
    """Ids derived from file and line are written out, so that they stay equal to those in the scores."""
    rows = read(folder / "prompts.jsonl")
    del rows[0]["id"]
    write_rows(folder / "prompts.jsonl", rows)
    scores = read(folder / "scores.jsonl")
    for row in scores:
        if row["id"] == "math00":
            row["id"] = f"{folder}/prompts.jsonl:1"
    write_rows(folder / "scores.jsonl", scores)
    assert run(folder) == 0
    assert read(folder / "kept.jsonl")[0] == {"id": f"{folder}/prompts.jsonl:1", **rows[0]}


def test_dry_run_prints_the_plan_and_writes_nothing(folder, capsys):
    before = sorted(folder.iterdir())
    assert run(folder, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "type 'math'" in out and "keep_share" in out and out.count("writes") == 4
    assert "nothing was started" in out
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["select_prompts.keep_share=0"], "select_prompts.keep_share: expected more than 0"),
        (["select_prompts.max_pass_rate=1.5"], "select_prompts.max_pass_rate"),
        (["select_prompts.min_spread=nan"], "select_prompts.min_spread"),
        (["select_prompts.scores_path=/none.jsonl"], "select_prompts.scores_path: /none.jsonl does not exist"),
        (["select_prompts.output_path="], "select_prompts.output_path"),
        (["select_prompts.output_path={folder}"], "is a folder; give a file"),
        (["select_prompts.output_path={folder}/prompts.jsonl"], "is one of data.train_files"),
        (["select_prompts.rule=hardest"], "select_prompts.rule"),
        (["select_prompts.rule=pass_rate"], "no prompt has more than one score"),
        (["select_prompts.scores_path="], "policy.path: expected a Hugging Face model folder"),
        (["data.train_files=[]"], "data.train_files: expected at least one file"),
        (["data.prompt_field=question"], "prompts.jsonl:1: field 'question'"),
    ],
)
def test_bad_settings_are_one_line_errors_and_nothing_is_written(folder, capsys, overrides, message):
    before = sorted(folder.iterdir())
    assert run(folder, *(item.format(folder=folder) for item in overrides)) == 2
    assert message in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"score": 1.0}, "scores.jsonl:1: field 'id': expected the prompt's id, got nothing"),
        ({"id": "math00"}, "scores.jsonl:1: field 'score' is missing"),
        ({"id": "math00", "score": "high"}, "expected a finite number or null, got str"),
        ({"id": "math00", "score": True}, "expected a finite number or null, got bool"),
        ({"id": "math00", "score": float("nan")}, "expected a finite number or null, got float"),
        ({"id": "other", "score": 1.0}, "none of 1 rows has the id of a prompt"),
    ],
)
def test_bad_scores_are_rejected_with_file_and_line(folder, capsys, row, message):
    write_rows(folder / "scores.jsonl", [row])
    assert run(folder) == 2
    assert message in capsys.readouterr().err


def test_unscored_and_foreign_scores_are_counted_and_shown(folder):
    scores = read(folder / "scores.jsonl")
    for row in scores:
        if row["id"] in ("math00", "math01"):
            row["score"] = None
    scores.append({"id": "stranger", "score": 1})
    write_rows(folder / "scores.jsonl", scores)
    assert run(folder) == 0
    assert [row["id"] for row in read(folder / "kept.jsonl")] == ["math02", "math03", "code00", "code01", "code02"]
    report = json.loads((folder / "kept.report.json").read_text())
    math = report["types"][1]
    assert math["num_unscored"] == 2 and math["dropped"]["none of its responses could be scored"] == 2
    assert report["notes"] == ["1 scores have no matching prompt."]


def test_empty_selection_is_an_error_and_the_report_lists_reasons(folder, capsys):
    scores = [{"id": f"math{i:02d}", "score": 0.0} for i in range(NUM_EACH) for _ in range(4)]
    write_rows(folder / "scores.jsonl", scores)
    assert run(folder, "select_prompts.rule=pass_rate") == 2
    assert "no prompt is left" in capsys.readouterr().err
    assert not (folder / "kept.jsonl").exists()
    assert "| math | never solved | 30 |" in (folder / "kept.report.md").read_text()


# ------------------------------------------------------------------------------------------------- generated responses


class FakeEngine:
    """Samples that depend on prompt and seed; generation fails after ``fail_after`` calls."""

    def __init__(self, fail_after=None):
        self.calls = Counter()
        self._fail_after = fail_after

    async def generate(self, request, prompt_id):
        await asyncio.sleep(0)
        if self._fail_after is not None and self.calls.total() >= self._fail_after:
            raise UserError("the engine died")
        self.calls[prompt_id] += 1
        rng = random.Random(f"{request.seed}/{request.input_ids}")
        return Generation(tuple(rng.choices(range(10), k=4)), (-1.0,) * 4, "stop", "default", 0)


async def grade(items):
    return [Score(float(len(set(item.response)) % 2), "parity") for item in items]


async def cannot_grade(items):
    return [Score(None, error="no grader") for _ in items]


PROMPTS = [Prompt(f"p{i}", (i, i + 1), type="ab"[i % 2]) for i in range(40)]
SAMPLING = Sampling(temperature=1, top_p=1, top_k=-1, stop_token_ids=(0,), seed=1)
PLAN = SamplingPlan(SAMPLING, lambda ids: "".join(map(str, ids)), num_samples=4, max_new_tokens=4)


def generate(path, engine, *, plan=PLAN, grade=grade, settings=None, prompts=PROMPTS, in_progress=3):
    with open_score_file(path, settings or {"seed": 1}) as scores:
        asyncio.run(
            generate_scores(
                prompts,
                plan,
                scores,
                generate=engine.generate,
                grade=grade,
                num_prompts_in_progress=in_progress,
                max_error_rate=0.1,
            )
        )


def by_sample(path):
    return {(row["id"], row["sample"]): row for row in read(path)}


def test_every_prompt_gets_its_samples_with_unique_seeds(tmp_path):
    generate(tmp_path / "s.jsonl", FakeEngine())
    rows = read(tmp_path / "s.jsonl")
    assert Counter(row["id"] for row in rows) == {p.id: 4 for p in PROMPTS}
    assert len({row["response"] for row in rows}) > 140
    assert len({sample_seed(s, p.id, i) for s in range(3) for p in PROMPTS for i in range(4)}) == 3 * 4 * len(PROMPTS)


@pytest.mark.parametrize("fail_after", [1, 37, 150])
def test_killed_selection_resumes_and_ends_with_the_same_scores(tmp_path, fail_after):
    generate(tmp_path / "whole.jsonl", FakeEngine(), in_progress=1)
    path = tmp_path / "killed.jsonl"
    with pytest.raises(UserError, match="engine died"):
        generate(path, FakeEngine(fail_after))
    kept = len(read(path))
    with open(path, "a") as file:
        file.write('{"id": "p39", "sa')  # a line torn by a kill
    engine = FakeEngine()
    generate(path, engine)
    assert engine.calls.total() == 4 * len(PROMPTS) - kept
    assert by_sample(path) == by_sample(tmp_path / "whole.jsonl")


def test_additional_samples_extend_the_stored_scores(tmp_path):
    path = tmp_path / "s.jsonl"
    generate(path, FakeEngine())
    before = by_sample(path)
    engine = FakeEngine()
    generate(path, engine, plan=replace(PLAN, num_samples=6))
    assert engine.calls == {p.id: 2 for p in PROMPTS}
    assert before.items() <= by_sample(path).items()


def test_scores_of_other_settings_are_rejected(tmp_path):
    generate(tmp_path / "s.jsonl", FakeEngine(), settings={"policy.path": "a", "run.seed": 1})
    with pytest.raises(UserError, match="policy.path was 'a', now 'b'.*delete it or set another run.output_dir"):
        generate(tmp_path / "s.jsonl", FakeEngine(), settings={"policy.path": "b", "run.seed": 1})
    (tmp_path / "s.settings.json").unlink()
    with pytest.raises(UserError, match="does not have their settings"):
        generate(tmp_path / "s.jsonl", FakeEngine(), settings={"policy.path": "a", "run.seed": 1})


def test_two_runs_cannot_write_the_same_score_file(tmp_path):
    with open_score_file(tmp_path / "s.jsonl", {}), pytest.raises(UserError, match="another run is writing"):
        generate(tmp_path / "s.jsonl", FakeEngine())


def test_failing_reward_stops_the_selection(tmp_path):
    with pytest.raises(RewardError, match="no grader"):
        generate(tmp_path / "s.jsonl", FakeEngine(), grade=cannot_grade)
