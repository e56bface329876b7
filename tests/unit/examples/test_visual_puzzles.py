"""Laws of the visual puzzles of examples/seed_vl_hybrid: what the pictures show is what the answers say."""

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from megatron_rl.config.load import load_config
from megatron_rl.data.conversation_rows import load_sequences
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.rewards.registry import resolve
from tests.unit.examples.test_example_tasks import make_task, rows_of
from tests.unit.examples.test_examples import ROOT

FOLDER = ROOT / "examples" / "seed_vl_hybrid"
VERIFIED = ("count", "locate", "clock")


@pytest.fixture(scope="module")
def puzzles():
    """The module of that name; ``pictures`` is reached through it."""
    paths = [str(FOLDER), str(ROOT / "examples")]
    sys.path[:0] = paths
    try:
        import puzzles

        return puzzles
    finally:
        del sys.path[: len(paths)]


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid") / "outputs" / "seed_vl_hybrid" / "task"
    make_task("seed_vl_hybrid", folder, "--num-train", "120", "--num-held-out", "30", "--num-judgements", "60")
    return folder


def recipe(task: Path):
    os.chdir(task.parents[2])
    return load_config(FOLDER / "seed_vl_hybrid.yaml", [f"policy.path={task / 'model'}"])


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(Path.cwd())


def test_the_same_seed_writes_the_same_bytes(task, tmp_path):
    make_task("seed_vl_hybrid", tmp_path, "--num-train", "120", "--num-held-out", "30", "--num-judgements", "60")
    files = sorted(path.relative_to(task) for path in task.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert all((tmp_path / file).read_bytes() == (task / file).read_bytes() for file in files)


def test_prompts_have_the_tokens_of_their_pictures_and_responses_are_known_text(task):
    config = recipe(task)
    tokenizer = Tokenizer(task / "model")
    limit = config.batch.max_prompt_tokens
    for files in (config.data.train_files, config.data.eval_files):
        found = load_prompts(files, config.data, tokenizer, max_prompt_tokens=limit)
        assert found.num_too_long == 0
        for prompt in found.prompts:
            assert [image.grid for image in prompt.images] in ([(1, 6, 6)], [])
            assert prompt.images or prompt.type in ("general", "named")
            assert tokenizer.decode(prompt.token_ids).count("<unk>") == 0
    sequences, _ = load_sequences([str(task / "prompts.train.jsonl")], config.data, tokenizer)
    assert max(int(one.mask.sum()) for one in sequences) <= config.batch.max_response_tokens


def test_no_held_out_picture_is_trained_on(task):
    pictures = {side: {p.read_bytes() for p in (task / "pictures" / side).iterdir()} for side in ("train", "held_out")}
    assert pictures["held_out"] and not pictures["train"] & pictures["held_out"]


def value_of(settings, solution: str, answer: str) -> float:
    score = resolve(settings.name).function(solution, answer, **settings.options)
    return score if isinstance(score, float) else score.value


@pytest.mark.parametrize("side", ["train", "held_out"])
def test_answers_are_worth_one_and_worked_solutions_leave_something_to_learn(task, side):
    rewards = recipe(task).reward.by_type
    rows = rows_of(task / f"prompts.{side}.jsonl")
    for type_ in VERIFIED:
        of_type = [row for row in rows if row["type"] == type_]
        assert all(value_of(rewards[type_], row["answer"], row["answer"]) == 1.0 for row in of_type)
        given = [(row["response"].rpartition("</think>")[2], row["answer"]) for row in of_type]
        right = [value_of(rewards[type_], *pair) == 1.0 for pair in given]
        assert sum(right) / len(right) == pytest.approx(0.5, abs=0.25), type_
    thoughts = ["<think>" in row["response"] for row in rows if "response" in row]
    assert sum(thoughts) / len(thoughts) == pytest.approx(0.8, abs=0.1)


def test_things_may_be_named_in_any_order(task):
    settings = recipe(task).reward.by_type["named"]
    answers = [row["answer"] for row in rows_of(task / "prompts.held_out.jsonl") if row["type"] == "named"]
    assert answers
    for answer in answers:
        assert {value_of(settings, order, answer) for order in answer.split("|")} == {1.0}
        first, _, second = answer.split("|")[0].partition(", ")
        assert value_of(settings, first, answer) == value_of(settings, f"{first}, {second}, {first}", answer) == 0.0


def test_judgements_are_half_right_and_say_what_the_texts_show(task):
    for side in ("train", "held_out"):
        rows = rows_of(task / f"judgements.{side}.jsonl")
        for row in rows:
            reference, response = re.search(r"\[Reference\]\n(.*)\n\n\[Response\]\n(.*)\n", row["prompt"]).groups()
            same = sorted(reference.split(", ")) == sorted(response.split(", "))
            assert row["response"] == ("YES" if same else "NO"), row
        assert 0.3 < sum(row["response"] == "YES" for row in rows) / len(rows) < 0.7


def test_pictures_show_what_the_answers_say(puzzles):
    pictures = sys.modules["pictures"]
    for type_ in puzzles.MAKERS:
        answers = Counter()
        for puzzle, _ in zip(puzzles.puzzles(type_, 200, held_out=False, seed=3), range(200)):
            image = pictures.draw(puzzle.scene)
            assert image.size == (pictures.SIDE, pictures.SIDE) and not puzzles.is_held_out(puzzle.scene)
            assert puzzle.solution != puzzle.wrong
            answers[puzzle.solution] += 1
            if type_ == "locate":
                colour = puzzle.question.split()[3]
                left, top, right, bottom = map(int, puzzle.solution[6:-7].split())
                pixels = [
                    (x, y)
                    for x in range(pictures.SIDE)
                    for y in range(pictures.SIDE)
                    if image.getpixel((x, y)) == pictures.COLOURS[colour]
                ]
                for axis, (low, high) in enumerate(((left, right), (top, bottom))):
                    seen = [pixel[axis] for pixel in pixels]
                    assert abs(min(seen) - low * puzzles.TENTH) < 2 and abs(max(seen) - high * puzzles.TENTH) < 2
        if type_ in ("count", "clock"):
            assert max(answers.values()) < 3 * 200 / len(answers), (
                "answers of a type are about as frequent as each other"
            )


def test_the_untrained_model_is_one_that_sglang_takes(task):
    from megatron_rl.families.model_facts import with_text
    from megatron_rl.families.sglang_limits import engine_problems

    config = json.loads((task / "model" / "config.json").read_text())
    assert list(engine_problems(with_text(config), "config.json")) == []
    assert len(config["vision_config"]["deepstack_visual_indexes"]) == 3
    assert config["vision_config"]["intermediate_size"] % 32 == 0
