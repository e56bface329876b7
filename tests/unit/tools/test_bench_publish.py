"""The account of a publish's control: what tools/bench_publish.py does not begin with."""

import json
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--servers 0", "--servers 0: expected at least 1"),
        ("--repeats=-1", "--repeats -1"),
        ("--bucket-mb 0", "--bucket-mb 0"),
        ("--load-ms nan", "--load-ms nan"),
        ("--stages 9 --layers 8", "--stages 9: the model has 8 layers"),
        ("--model /nowhere", "there is no config.json"),
        ("--model {} --stages 4", "--stages 4: the model has 3 layers"),
    ],
)
def test_bench_publish_rejects_impossible_layouts_by_name(monkeypatch, tmp_path, words, names):
    monkeypatch.syspath_prepend(TOOLS)
    from bench_publish import parse

    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 3}}))
    monkeypatch.setattr(sys, "argv", ["bench_publish.py", *words.format(tmp_path).split()])
    with pytest.raises(SystemExit, match=names):
        parse()
    monkeypatch.setattr(sys, "argv", ["bench_publish.py", "--model", str(tmp_path), "--stages", "3"])
    assert parse()["servers"] == 32
