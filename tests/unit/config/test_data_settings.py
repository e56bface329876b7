"""Checks of inputs, outputs and evaluation sets."""

import re

import pytest

from megatron_rl.config.checks import check_config
from megatron_rl.config.load import load_config
from tests.unit.config.recipes import problems


def test_missing_safetensors_are_reported_unless_weights_are_random(recipe, tmp_path):
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "policy.init=random" in problems(recipe)
    check_config(load_config(recipe, ["policy.init=random"]), command="train")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["eval.num_samples=32"], "eval.num_samples: 32 samples at temperature 0 are 32 times the same.*set eval.temperature"),
        (["eval.top_p=0.7"], "eval.top_p, top_k: temperature 0 always takes the most likely token.*got 0.7 and -1"),
        (["eval.top_k=5"], "eval.top_p, top_k: temperature 0.*got 1.0 and 5"),
        (["eval.sets={}", "eval.temperature=1", "eval.top_p=0"], "eval.top_p: expected more than 0 and up to 1, got 0"),
        (["eval.num_samples=0"], "eval.num_samples: expected at least 1, got 0"),
        (["eval.sets.a.files=[FILE]"], "eval.sets: data.eval_files is already a set"),
        (["data.eval_files=[]", "eval.sets.a.num_samples=2", "eval.sets.a.files=[FILE]"], "eval.sets.a.num_samples: 2 samples"),
        (["data.eval_files=[]", "eval.sets.a={}"], "eval.sets.a.files: expected at least one file, got none"),
        (["data.eval_files=[]", "eval.sets.a.files=[/nowhere]"], "eval.sets.a.files: /nowhere does not exist"),
        (["data.eval_files=[]", "eval.sets={'a/b': {files: [FILE]}}"], "eval.sets: 'a/b' becomes part of metrics"),
        (["data.eval_files=[]", "eval.sets.reward.files=[FILE]"], "eval.sets: 'reward'.*none of reward, dialogue"),
        (["data.eval_files=[]", "eval.sets.a={files: [FILE], num_samples: -1}"], "eval.sets.a.num_samples: expected at least 1"),
        (["data.eval_files=[]", "eval.every_steps=2"], "data.eval_files.*or eval.sets"),
    ],
)
def test_evaluations_that_cannot_be_sampled_or_named_are_rejected(recipe, tmp_path, overrides, words):
    file = str(tmp_path / "train.jsonl")
    overrides = [f"data.eval_files=[{file}]", *(item.replace("FILE", file) for item in overrides)]
    assert re.search(words, problems(recipe, *overrides))
