"""Laws of examples/arithmetic/make_task.py: true answers, disjoint sides, equal lengths, same bytes, all or nothing."""

import importlib.util
import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "arithmetic" / "make_task.py"
NAMES = ("train", "sft", "eval")


def _load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_task", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_task"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


make_task = _load_script()


def _run(output: Path, *arguments: str) -> int:
    sizes = ("--num-train", "300", "--num-sft", "300", "--num-eval", "200")
    return make_task.main(["--output", str(output), *sizes, *arguments])


def _rows(folder: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("arithmetic") / "task"
    assert _run(output) == 0
    return output


@pytest.mark.parametrize("name", NAMES)
def test_totals_are_the_running_sums_and_the_answer_is_the_last(task: Path, name: str) -> None:
    for row in _rows(task, name):
        if name == "sft" and row["response"].count("=") < row["prompt"].count(":") - 1:
            continue  # a hasty one
        terms = [int(x) for x in re.findall(r":(\d)(?!\d)", row["prompt"])]
        steps = re.findall(r" ([a-z]):(\d)=(\d\d)", row["response"])
        assert [int(term) for _, term, _ in steps] == terms[1:]
        assert [int(total) for _, _, total in steps] == [sum(terms[: i + 1]) for i in range(1, len(terms))]
        assert [label for label, _, _ in steps] == re.findall(r"([a-z]):", row["prompt"])[1:]
        assert row["answer"] == steps[-1][2]


def test_hasty_solutions_are_the_beginning_of_the_whole_one_and_stand_in_sft_alone() -> None:
    chains, num_rows = make_task.ChainDistribution(2, 16, 1.0), 2000
    hasty, whole = (list(make_task.rows("sft", num_rows, chains, make_task.Haste(share, 3), 1)) for share in (0.6, 0.0))
    long_chains = [row for row in hasty if row["prompt"].count(":") > 4]
    stopped = [row for row in long_chains if row["response"].count("=") == 3]
    assert len(stopped) / len(long_chains) == pytest.approx(0.6, abs=0.05)
    whole_by_prompt = {row["prompt"]: row["response"] for row in whole}
    assert all(row["response"].count("=") in (3, row["prompt"].count(":") - 1) for row in long_chains)
    for row in hasty:
        assert whole_by_prompt.get(row["prompt"], row["response"]).startswith(row["response"])
    for name in ("train", "eval"):
        rows = make_task.rows(name, 200, chains, make_task.Haste(0.6, 3), 1)
        assert all(row["response"].count("=") == row["prompt"].count(":") - 1 for row in rows)


def test_solutions_get_the_full_reward_and_a_wrong_total_none(task: Path) -> None:
    from megatron_rl.rewards.rules.math import score

    for row in _rows(task, "eval")[:50]:
        assert score(row["response"], row["answer"], extract="last_number").value == 1.0
        wrong = f"{(int(row['answer']) + 1) % 100:02d}"
        assert score(row["response"][:-2] + wrong, row["answer"], extract="last_number").value == 0.0


def test_no_eval_prompt_is_trained_on(task: Path) -> None:
    prompts = {name: {row["prompt"] for row in _rows(task, name)} for name in NAMES}
    assert not prompts["eval"] & (prompts["train"] | prompts["sft"])


def test_ids_are_unique(task: Path) -> None:
    ids = [row["id"] for name in NAMES for row in _rows(task, name)]
    assert len(set(ids)) == len(ids) == 800


def test_eval_has_the_lengths_of_train(tmp_path: Path) -> None:
    chains = make_task.ChainDistribution(2, 5, 0.5)
    counts = {
        name: Counter(row["prompt"].count(":") for row in make_task.rows(name, 4000, chains, make_task.Haste(0.6, 3), 1)) for name in NAMES
    }
    expected = {2: 8 / 15, 3: 4 / 15, 4: 2 / 15, 5: 1 / 15}
    for name in NAMES:
        for num_terms, share in expected.items():
            assert counts[name][num_terms] / 4000 == pytest.approx(share, abs=0.04), (name, num_terms)


def test_same_arguments_write_the_same_bytes_and_another_seed_others(task: Path, tmp_path: Path) -> None:
    assert _run(tmp_path / "again") == 0
    assert _run(tmp_path / "other", "--seed", "2") == 0
    files = [path.relative_to(task) for path in sorted(task.rglob("*")) if path.is_file()]
    assert len(files) == 6
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (task / file).read_bytes(), file
    for name in NAMES:
        assert (tmp_path / "other" / f"{name}.jsonl").read_bytes() != (task / f"{name}.jsonl").read_bytes()


@pytest.mark.parametrize("loader", ["package", "transformers"])
def test_every_text_is_one_token_a_label_or_digit_and_decodes_to_itself(task: Path, loader: str) -> None:
    from megatron_rl.data.tokenizer import Tokenizer

    tokenizer = Tokenizer(task / "model")
    if loader == "transformers":
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(task / "model"))
    assert tokenizer.decode(tokenizer.encode("a:3 b:8 c:1= b:8=11 c:1=12")) == "a:3 b:8 c:1= b:8=11 c:1=12"
    for row in _rows(task, "train"):
        num_terms = row["prompt"].count(":")
        prompt_ids, response_ids = tokenizer.encode(row["prompt"]), tokenizer.encode(row["response"])
        assert (len(prompt_ids), len(response_ids)) == (2 * num_terms + 1, 5 * (num_terms - 1))
        assert make_task.vocabulary().index(make_task.UNKNOWN_TOKEN) not in prompt_ids + response_ids
        assert tokenizer.decode(prompt_ids) == row["prompt"] and tokenizer.decode(response_ids) == row["response"]


def test_the_model_folder_is_one_that_training_accepts(task: Path) -> None:
    from megatron_rl.config.schema import ParallelConfig
    from megatron_rl.models.hf.megatron_config import check_layout
    from megatron_rl.models.hf.model_config import load_hf_config

    config = load_hf_config(task / "model")
    assert config.vocab_size == len(make_task.vocabulary())
    for size in (1, 2, 4):
        check_layout(config, ParallelConfig(tensor_parallel_size=size))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-terms", "27"), "max-terms <= 26"),
        (("--min-terms", "1"), "2 <= min-terms"),
        (("--min-terms", "9", "--max-terms", "4"), "min-terms 9 and max-terms 4"),
        (("--length-decay", "0"), "0 < length-decay <= 1"),
        (("--length-decay", "1.5"), "got 1.5"),
        (("--hasty-share", "1"), "hasty-share < 1"),
        (("--hasty-totals", "0"), "hasty-totals of at least 1"),
    ],
)
def test_impossible_arguments_are_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert _run(tmp_path / "task", *arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_count_below_one_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        make_task.main(["--output", str(tmp_path / "task"), "--num-eval", "0"])
    assert stopped.value.code == 2
    assert "expected at least 1, got 0" in capsys.readouterr().err


def test_an_existing_folder_is_kept_unless_told_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "task"
    output.mkdir()
    (output / "mine.txt").write_text("keep me")
    assert _run(output) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert [path.name for path in output.iterdir()] == ["mine.txt"]
    assert _run(output, "--overwrite") == 0
    assert not (output / "mine.txt").exists() and (output / "model" / "tokenizer.json").is_file()


def test_a_failure_halfway_leaves_the_old_folder_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "task"
    output.mkdir()
    (output / "mine.txt").write_text("keep me")

    def fail(folder: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(make_task, "write_model_folder", fail)
    assert _run(output, "--overwrite") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["task"]
    assert (output / "mine.txt").read_text() == "keep me"
