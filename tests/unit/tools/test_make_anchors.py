"""tools/make_anchors.py: the best of N responses as anchor, whatever the order of the rows."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.trajectory import Prompt
from megatron_rl.errors import DataError
from megatron_rl.rewards.judges.pairwise import check_prompts

SCRIPT = Path(__file__).parents[3] / "tools" / "make_anchors.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_anchors", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tool = load()


def placed(*rows: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    return [(row, f"f:{number}") for number, row in enumerate(rows, start=1)]


def scored(id_: Any, response: str, score: float | None) -> dict[str, Any]:
    return {"id": id_, "response": response, "score": score}


def test_the_best_scored_response_of_each_prompt_is_its_anchor():
    best = tool.best_responses(placed(scored(1, "a", 0.1), scored("2", "b", 0.9), scored("1", "c", 0.7)))
    rows, missing = tool.with_anchors(placed({"id": 2, "prompt": "q"}, {"id": "1", "prompt": "p"}), best)
    assert rows == [
        {"id": 2, "prompt": "q", "anchor": "b", "anchor_score": 0.9},
        {"id": "1", "prompt": "p", "anchor": "c", "anchor_score": 0.7},
    ]
    assert missing == []
    prompts = [Prompt(str(r["id"]), (1,), r["prompt"], fields={"anchor": r["anchor"]}) for r in rows]
    assert check_prompts(prompts, {}) == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from("xyz"), st.text("ab", min_size=1, max_size=3), st.sampled_from([0.0, 0.5, 1.0, None])
        ),
        max_size=12,
    ),
    st.randoms(use_true_random=False),
)
def test_the_choice_does_not_depend_on_the_order_of_rows(rows: list[tuple], random: Any):
    shuffled = random.sample(rows, len(rows))
    first, second = (tool.best_responses(placed(*[scored(*row) for row in each])) for each in (rows, shuffled))
    assert first == second
    for key, best in first.items():
        own = [(score, text) for id_, text, score in rows if id_ == key and score is not None]
        assert best.score == max(score for score, _ in own) and best.num_responses == len(own)


def test_ties_go_to_the_shorter_and_then_to_the_alphabet():
    texts = ["bbb", "ab", "aa", "ccc"]
    assert tool.best_responses(placed(*[scored("1", text, 0.5) for text in texts]))["1"].solution == "aa"


def test_unscored_responses_and_broken_thoughts_are_no_anchors_and_thoughts_are_cut_off():
    rows = [
        scored("1", "unscored", None),
        scored("1", "<think>open", 1.0),
        scored("1", "   ", 1.0),
        scored("1", "<think>t</think>solution", 0.25),
    ]
    assert tool.best_responses(placed(*rows)) == {"1": tool.Best(0.25, "solution", 1)}


def test_prompts_without_an_anchor_are_an_error_or_dropped():
    best = tool.best_responses(placed(scored("1", "a", 1.0)))
    prompts = placed({"id": "1"}, {"id": "2"})
    with pytest.raises(DataError, match=r"(?s)1 prompts have no anchor.*f:2: id '2'"):
        tool.with_anchors(prompts, best)
    rows, missing = tool.with_anchors(prompts, best, drop=True)
    assert [row["id"] for row in rows] == ["1"] and len(missing) == 1


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"response": "a", "score": 1}, "'id'"),
        ({"id": 1, "score": 1}, "'response'"),
        ({"id": 1, "response": "a"}, "'score'"),
        ({"id": 1, "response": "a", "score": "1"}, "'score'"),
        ({"id": 1, "response": "a", "score": True}, "'score'"),
    ],
)
def test_bad_rows_are_refused_with_their_source(row: dict[str, Any], field: str):
    with pytest.raises(DataError, match=f"f:1: field {field}"):
        tool.best_responses(placed(row))


def test_a_prompt_twice_is_refused():
    best = tool.best_responses(placed(scored("1", "a", 1.0)))
    with pytest.raises(DataError, match="already stands at f:1"):
        tool.with_anchors(placed({"id": "1"}, {"id": 1}), best)


def test_the_command_writes_the_file_and_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture):
    for name, rows in (
        ("scored", [scored("1", "a", 0.5), scored("1", "b", 1.0)]),
        ("prompts", [{"id": "1"}, {"id": "2"}]),
    ):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = ["--scored", str(tmp_path / "scored.jsonl"), "--prompts", str(tmp_path / "prompts.jsonl")]
    output = tmp_path / "out.jsonl"
    assert tool.main([*paths, "--output", str(output)]) == 2 and not output.exists()
    assert "f" in capsys.readouterr().err
    assert tool.main([*paths, "--output", str(output), "--drop"]) == 0
    assert json.loads(output.read_text()) == {"id": "1", "anchor": "b", "anchor_score": 1.0}
    assert "best of 2 to 2 responses" in capsys.readouterr().out
