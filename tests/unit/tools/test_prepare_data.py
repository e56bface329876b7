"""The tool's laws: every good row becomes one that training reads, every bad one is listed with place and reason."""

import base64
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.config.schema import DataConfig
from megatron_rl.data.conversation_rows import check_supervised_files
from megatron_rl.data.preferences import load_preferences

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tools" / "prepare_data.py"
PUBLIC = ROOT / "../shared/data"
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def _load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_data", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["prepare_data"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


prepare_data = _load_script()


def write(folder, rows, name="in.jsonl"):
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), folder / name)
    else:
        (folder / name).write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return folder / name


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def prepare(folder, kind, rows, *options, name="in.jsonl"):
    """(exit status, rows written, bad rows)."""
    output = folder / "out.jsonl"
    status = prepare_data.main([kind, "--input", str(write(folder, rows, name)), "--output", str(output), *options])
    return status, read(output), read(folder / "out.bad.jsonl")


def one(folder, kind, row, *options, name="in.jsonl"):
    status, rows, bad = prepare(folder, kind, [row], *options, name=name)
    assert (status, len(rows), bad) == (0, 1, [])
    return rows[0]


CHAT = [{"role": "user", "content": "Solve: 1+1. Answer: $Answer"}]
USER, GOOD, POOR = (
    {"role": r, "content": c} for r, c in (("user", "Hi?"), ("assistant", "Yes."), ("assistant", "No."))
)
SYSTEM = {"role": "system", "content": "Be kind."}
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": "import math\n\n\ndef add(a, b):\n    '''Add.'''\n",
    "canonical_solution": "    return a + b\n",
    "test": "\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n\n",
    "entry_point": "add",
}
MBPP = {
    "task_id": 7,
    "text": "Write a function to add.",
    "code": "import math\r\ndef helper(x):\r\n  return x\r\ndef add(a, b):\r\n  return helper(a) + b",
    "test_list": ["assert add(1, 2) == 3", "assert math.isclose(add(1, 0), 1)"],
    "test_setup_code": "import math",
}


def test_gsm8k_gives_the_number_and_a_clean_solution(tmp_path):
    row = one(tmp_path, "gsm8k", {"question": "How many?", "answer": "2*600 = <<2*600=1200>>1200\n#### 1,200"})
    assert row == {
        "id": "gsm8k-in-1",
        "prompt": "How many?",
        "answer": "1200",
        "response": "2*600 = 1200\n#### 1,200",
        "type": "math",
    }


def test_dapo_math_keeps_messages_answer_and_index(tmp_path):
    source = {
        "data_source": "math_dapo",
        "prompt": CHAT,
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": "uuid-1"},
    }
    row = one(tmp_path, "dapo_math", source, name="dapo.parquet")
    assert row == {"id": "uuid-1", "prompt": CHAT, "answer": "2", "type": "math", "source": "math_dapo"}


def test_repeated_rows_are_left_out_and_counted(tmp_path, capsys):
    """The public file holds every problem a hundred times."""
    row = {"prompt": CHAT, "reward_model": {"ground_truth": "2"}, "extra_info": {"index": "a"}}
    status, rows, bad = prepare(tmp_path, "dapo_math", [row] * 100)
    assert (status, len(rows), bad) == (0, 1, [])
    assert "repeated, left out │  99" in capsys.readouterr().out


def test_humaneval_tests_call_the_check_and_accept_the_canonical_solution(tmp_path):
    row = one(tmp_path, "humaneval", HUMAN_EVAL)
    assert (row["id"], row["type"], row["entry_point"]) == ("HumanEval/0", "code", "add")
    assert row["prompt"] == row["prompt_code"] and row["answer"] == row["response"] == "    return a + b\n"
    exec(row["prompt_code"] + row["response"] + "\n" + row["tests"], {})
    with pytest.raises(AssertionError):
        exec(row["prompt_code"] + "    return a - b\n" + row["tests"], {})


@pytest.mark.parametrize("edition", ["full", "sanitized"])
def test_mbpp_tests_accept_the_reference_and_name_its_function(tmp_path, edition):
    source = dict(MBPP)
    if edition == "sanitized":
        source["prompt"], source["test_imports"] = source.pop("text"), [source.pop("test_setup_code")]
    row = one(tmp_path, "mbpp", source)
    assert (row["id"], row["entry_point"]) == ("mbpp/7", "add")
    assert row["prompt"].startswith("Write a function to add.\nYour code should pass these tests:\n\nassert add(1, 2)")
    exec(row["answer"] + "\n" + row["tests"], {})
    with pytest.raises(AssertionError):
        exec("def add(a, b):\n  return 0\n" + row["tests"], {})


HH = "\n\nHuman: Hi?\n\nAssistant: Hello.\n\nHuman: More: a\nb\n\nAssistant: "


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        ({"prompt": "Hi?", "chosen": "Yes.", "rejected": "No."}, "Hi?"),
        ({"question": "Hi?", "system": "Be kind.", "chosen": "Yes.", "rejected": "No."}, [SYSTEM, USER]),
        ({"prompt": [USER], "chosen": "Yes.", "rejected": "No."}, [USER]),
        ({"prompt": "Hi?", "chosen": [USER, GOOD], "rejected": [USER, POOR]}, [USER]),
        ({"chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, POOR]}, [SYSTEM, USER]),
        ({"prompt": "Hi?", "chosen": [GOOD], "rejected": [POOR]}, [USER]),
        ({"prompt": "\n\nHuman: Hi?\n\nAssistant:", "chosen": " Yes.", "rejected": " No."}, [USER]),
        (
            {"chosen": HH + "Yes.", "rejected": HH + "No."},
            [USER, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "More: a\nb"}],
        ),
    ],
)
def test_preferences_come_in_every_usual_form_and_training_reads_them(tmp_path, source, prompt):
    row = one(tmp_path, "preferences", source)
    assert row["prompt"] == prompt
    assert (row["chosen"].strip(), row["rejected"].strip()) == ("Yes.", "No.")
    (preference,) = load_preferences([str(tmp_path / "out.jsonl")], DataConfig())
    assert (preference.content.prompt, preference.chosen) == (prompt, row["chosen"])


def test_a_conversation_becomes_prompt_and_response(tmp_path):
    turns = [("system", "Be brief."), ("user", "1+1?"), ("assistant", "2"), ("user", "2+2?"), ("assistant", "4")]
    rows = one(tmp_path, "messages", {"messages": [{"role": role, "content": text} for role, text in turns], "answer": 4})
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    shared = one(tmp_path, "messages", {"conversations": [{"from": names[role], "value": text} for role, text in turns]})
    assert rows["prompt"] == shared["prompt"] and [message["role"] for message in rows["prompt"]] == [role for role, _ in turns[:-1]]
    assert rows["response"] == shared["response"] == "4" and rows["answer"] == "4" and "answer" not in shared
    question = one(tmp_path, "messages", {"messages": [{"role": "user", "content": "1+1?"}]})
    assert question["prompt"] == [{"role": "user", "content": "1+1?"}] and "response" not in question


def test_a_whole_conversation_keeps_its_turns_tools_and_weights(tmp_path):
    call = {"name": "add", "arguments": {"a": 1, "b": 2}}
    turns = [("human", "1+2?"), ("function_call", json.dumps(call)), ("observation", "3"), ("gpt", "3")]
    source = {"conversations": [{"from": who, "value": said} for who, said in turns], "tools": json.dumps([{"name": "add"}])}
    source["conversations"][1]["weight"] = 0
    row = one(tmp_path, "conversations", source)
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert row["messages"][1] == {
        "role": "assistant", "content": "", "weight": 0, "tool_calls": [{"type": "function", "function": call}]
    }  # fmt: skip
    assert row["messages"][3] == {"role": "assistant", "content": "3"} and row["tools"] == [{"name": "add"}]
    assert check_supervised_files([str(tmp_path / "out.jsonl")], DataConfig(messages_field="messages")) == 1


def test_images_by_path_are_checked_and_named_from_the_outputs_folder(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(PNG)
    source = {"image": "a.png", "problem": "<image> What?", "solution": "<think>..</think><answer> 3 </answer>"}
    row = one(tmp_path, "multimodal", source, "--image-root", str(tmp_path / "pictures"))
    assert row["images"] == ["pictures/a.png"] and (row["answer"], row["type"]) == ("3", "multimodal")


def test_embedded_images_are_written_once_each(tmp_path):
    image = {"bytes": PNG, "path": None}
    rows = [{"images": [image, image], "question": f"{i}?", "answer": "3"} for i in range(2)]
    status, rows, _ = prepare(tmp_path, "multimodal", rows, name="in.parquet")
    assert status == 0 and len({image for row in rows for image in row["images"]}) == 1
    (file,) = (tmp_path / "out_images").iterdir()
    assert file.read_bytes() == PNG and rows[0]["images"][0] == f"out_images/{file.name}"


@pytest.mark.parametrize(
    ("fields", "options", "answer", "kind"),
    [
        ({"bbox": [1, 2, 30.5, 40]}, (), "1 2 30.5 40", "grounding"),
        ({"bbox": [1, 2, 3, 4]}, ("--bbox-format", "xywh"), "1 2 4 6", "grounding"),
        ({"choices": ["red", "blue"], "answer": "blue"}, (), "B", "choice"),
        ({"choices": ["red", "blue"], "answer": 0}, (), "A", "choice"),
        ({"options": ["3", "5"], "answer": "(b)"}, (), "B", "choice"),
        ({"answer": 7}, (), "7", "multimodal"),
    ],
)
def test_answers_of_multimodal_rows(tmp_path, fields, options, answer, kind):
    (tmp_path / "a.png").write_bytes(PNG)
    row = one(tmp_path, "multimodal", {"image": "a.png", "question": "Which?", **fields}, *options)
    assert (row["answer"], row["type"]) == (answer, kind)
    assert ("\nA. " in row["prompt"]) == (kind == "choice")


@pytest.mark.parametrize(
    ("kind", "row", "reason"),
    [
        (
            "gsm8k",
            {"question": "?", "answer": "It is 3."},
            "expected a last line '#### number', got the end 'It is 3.'",
        ),
        ("gsm8k", {"question": "?", "answer": "#### three"}, "expected a number after ####, got 'three'"),
        ("gsm8k", {"question": " ", "answer": "#### 3"}, "question: expected text, got empty text"),
        ("gsm8k", {"answer": "#### 3"}, "question: expected text, got nothing"),
        ("gsm8k", "{broken", "not valid JSON"),
        ("gsm8k", "[1]", "expected a JSON object, got list"),
        ("dapo_math", {"prompt": CHAT}, "reward_model.ground_truth: expected the answer, got nothing"),
        (
            "dapo_math",
            {"prompt": [GOOD], "reward_model": {"ground_truth": "2"}},
            "a last message of user, got assistant",
        ),
        ("dapo_math", {"prompt": [3], "reward_model": {"ground_truth": "2"}}, "message 1: expected role and content"),
        ("humaneval", {**HUMAN_EVAL, "canonical_solution": "  return ("}, "not a Python program"),
        ("humaneval", {**HUMAN_EVAL, "entry_point": "sub"}, "'sub' is not a function"),
        ("humaneval", {**HUMAN_EVAL, "test": "assert True"}, "expected a function check(candidate)"),
        ("mbpp", {**MBPP, "test_list": []}, "test_list: expected a list of assert statements"),
        ("mbpp", {**MBPP, "code": "def sub(a, b): pass"}, "no test calls a function of code, which has sub"),
        ("mbpp", {**MBPP, "code": "def add(a, b:"}, "code: not a Python program"),
        ("messages", {"messages": [{"role": "assistant", "content": "4"}]}, "messages: expected messages, got list"),
        ("messages", {"messages": "1+1?"}, "messages: expected messages, got str"),
        ("conversations", {"messages": [USER]}, "expected a turn of the assistant to train, got none"),
        ("preferences", {"prompt": "Hi?", "chosen": "Yes.", "rejected": "Yes. "}, "chosen and rejected are the same"),
        ("preferences", {"chosen": "Yes.", "rejected": "No."}, "prompt or question or instruction or input"),
        ("preferences", {"chosen": [USER, GOOD], "rejected": [SYSTEM, POOR]}, "differ before their last message"),
        ("preferences", {"chosen": [USER, GOOD], "rejected": [GOOD, USER]}, "a last message of assistant, got user"),
        ("preferences", {"chosen": HH + "Yes.", "rejected": HH.replace("Hi", "Ho") + "No."}, "differ before"),
        ("multimodal", {"question": "?", "answer": "3"}, "expected an image, got nothing"),
        ("multimodal", {"image": "b.png", "question": "?", "answer": "3"}, "b.png does not exist; see --image-root"),
        ("multimodal", {"image": "a.png", "question": "?"}, "answer, solution: expected text or a number"),
        (
            "multimodal",
            {"image": "a.png", "question": "<image><image>?", "answer": "3"},
            "2 <image> marks for 1 images",
        ),
        ("multimodal", {"image": "a.png", "question": "?", "bbox": [3, 4, 1, 2]}, "expected x1 < x2 and y1 < y2"),
        ("multimodal", {"image": "a.png", "question": "?", "bbox": [1, 2, 3]}, "bbox: expected four numbers"),
        (
            "multimodal",
            {"image": "a.png", "question": "?", "choices": ["x", "y"], "answer": "z"},
            "one of the 2 choices",
        ),
    ],
)
def test_a_bad_row_is_listed_with_place_and_reason(tmp_path, capsys, kind, row, reason):
    (tmp_path / "a.png").write_bytes(PNG)
    status, rows, bad = prepare(tmp_path, kind, [row])
    assert (status, rows) == (2, [])
    assert [entry["place"] for entry in bad] == [f"{tmp_path}/in.jsonl:1"] and reason in bad[0]["reason"]
    error = capsys.readouterr().err
    assert "1 of 1 rows are bad; nothing was written" in error and reason in error


def test_bytes_that_are_no_image_are_a_bad_row(tmp_path):
    _, _, bad = prepare(tmp_path, "multimodal", [{"image": b"text", "question": "?", "answer": "3"}], name="in.parquet")
    assert bad[0]["place"].endswith("in.parquet:row 1") and "no PNG, JPEG" in bad[0]["reason"]


ROWS = [
    {"question": "1?", "answer": "#### 1"},
    "{broken",
    {"question": "2?", "answer": "none"},
    {"question": "3?", "answer": "#### 3"},
]


def test_bad_rows_are_skipped_where_that_is_asked_for(tmp_path, capsys):
    status, rows, bad = prepare(tmp_path, "gsm8k", ROWS, "--skip-bad-rows")
    assert status == 0 and [row["id"] for row in rows] == ["gsm8k-in-1", "gsm8k-in-4"]
    assert [entry["place"].rsplit(":", 1)[1] for entry in bad] == ["2", "3"]
    out = capsys.readouterr().out
    assert "bad, left out" in out and "expected a last line" in out


def test_without_that_an_earlier_output_stays_and_bad_rows_of_an_earlier_run_do_not(tmp_path):
    good = [ROWS[0]]
    assert prepare(tmp_path, "gsm8k", ROWS)[0] == 2
    assert prepare(tmp_path, "gsm8k", good) == (0, read(tmp_path / "out.jsonl"), [])
    before = (tmp_path / "out.jsonl").read_bytes()
    status, _, bad = prepare(tmp_path, "gsm8k", ROWS)
    assert status == 2 and len(bad) == 2 and (tmp_path / "out.jsonl").read_bytes() == before


def test_nothing_left_is_an_error_even_where_bad_rows_are_skipped(tmp_path, capsys):
    assert prepare(tmp_path, "gsm8k", [ROWS[1]], "--skip-bad-rows")[0] == 2
    assert "no row is left of 1" in capsys.readouterr().err
    assert prepare(tmp_path, "gsm8k", [], "--skip-bad-rows")[0] == 2


def test_one_id_for_two_contents_is_bad(tmp_path):
    rows = [{"prompt": CHAT, "reward_model": {"ground_truth": a}, "extra_info": {"index": 1}} for a in "23"]
    _, _, bad = prepare(tmp_path, "dapo_math", rows)
    assert bad == [{"place": f"{tmp_path}/in.jsonl:2", "reason": "id '1' is that of an earlier row with other content"}]


def test_files_of_one_name_keep_their_ids_apart(tmp_path):
    files = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        files.append(str(write(tmp_path / folder, [ROWS[0]])))
    assert prepare_data.main(["gsm8k", "--input", *files, "--output", str(tmp_path / "out.jsonl")]) == 0
    assert [row["id"] for row in read(tmp_path / "out.jsonl")] == ["gsm8k-in1-1", "gsm8k-in2-1"]


def test_the_type_may_be_named_and_an_input_is_never_overwritten(tmp_path, capsys):
    assert one(tmp_path, "gsm8k", ROWS[0], "--type", "grade school")["type"] == "grade school"
    file = write(tmp_path, [ROWS[0]])
    assert prepare_data.main(["gsm8k", "--input", str(file), "--output", str(file)]) == 2
    assert "is one of the inputs" in capsys.readouterr().err and read(file) == [ROWS[0]]
    assert prepare_data.main(["gsm8k", "--input", "/none.jsonl", "--output", str(tmp_path / "x.jsonl")]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "source", "number"),
    [("gsm8k", "gsm8k/test.jsonl", 1319), ("humaneval", "humaneval/HumanEval.jsonl.gz", 164)],
)
def test_the_public_files_become_rows_that_training_reads(tmp_path, kind, source, number):
    if not (PUBLIC / source).is_file():
        pytest.skip(f"{PUBLIC / source} is not here")
    output = tmp_path / "out.jsonl"
    assert prepare_data.main([kind, "--input", str(PUBLIC / source), "--output", str(output)]) == 0
    fields = ["tests", "entry_point", "prompt_code"] if kind == "humaneval" else []
    data = DataConfig(reward_fields=fields)
    assert check_supervised_files([str(output)], data) == number
    if fields:
        for row in read(output):
            compile(row["prompt_code"] + row["response"] + "\n" + row["tests"], row["id"], "exec")
