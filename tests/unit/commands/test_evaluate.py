"""Checks of `megatron-rl evaluate` before it starts a server, and folders that it skips."""

import json
import re

import pytest

from megatron_rl.cli import main
from megatron_rl.config.schema import Config
from megatron_rl.step import evaluate_policies
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies")
    (folder / "eval.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    for name, layers in (("a", 1), ("b", 1), ("deep", 2)):
        make_tiny_model(folder / name, num_hidden_layers=layers)
    return folder


def evaluate(folder, *names, sets="[eval.jsonl]"):
    recipe = folder / "recipe.yaml"
    recipe.write_text("reward: {name: math}\nbatch: {max_prompt_tokens: 16, max_response_tokens: 16}\n")
    files = sets.replace("eval.jsonl", str(folder / "eval.jsonl"))
    paths = [str(folder / name) for name in names]
    return main(
        ["evaluate", f"--config={recipe}", "--dry-run", "--policies", *paths, f"data.eval_files={files}", "eval.num_samples=2"]
    )


def test_evaluate_accepts_folders_before_overrides(folders, capsys):
    assert evaluate(folders, "a", "b") == 0
    assert "2 policies would be measured" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "sets", "words"),
    [
        (["a", "nowhere"], "[eval.jsonl]", "nowhere has no config.json"),
        (["a", "deep"], "[eval.jsonl]", "another architecture than .*num_hidden_layers"),
        (["a"], "[]", "data.eval_files: expected at least one file"),
        ([], "[eval.jsonl]", "expected at least one Hugging Face folder"),
    ],
)
def test_evaluate_rejects_bad_folders_and_sets_with_a_reason(folders, names, sets, words, capsys):
    assert evaluate(folders, *names, sets=sets) == 2
    printed = capsys.readouterr()
    assert re.search(words, " ".join((printed.out + printed.err).split()))


def test_evaluate_skips_folders_measured_with_the_same_settings(tmp_path):
    data = tmp_path / "eval.jsonl"
    data.write_text('{"prompt": "p", "answer": "1"}\n')
    config = Config()
    config.data.eval_files = [str(data)]
    done, open_ = tmp_path / "done", tmp_path / "open"
    for folder in (done, open_):
        folder.mkdir()
    (done / "evaluation.json").write_text(json.dumps({"settings": evaluate_policies.evaluation_settings(config), "metrics": {}}))
    assert evaluate_policies.missing_evaluations(config, [done, open_]) == [open_]
    config.eval.num_samples = 4
    assert evaluate_policies.missing_evaluations(config, [done, open_]) == [done, open_]
    config.eval.num_samples = 1
    data.write_text('{"prompt": "p", "answer": "2"}\n')
    assert evaluate_policies.missing_evaluations(config, [done]) == [done]
