"""Damaged data files are read, or rejected with name, line and field, before a run starts."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.schema import Config, DataConfig
from megatron_rl.data.preferences import check_reward_files
from megatron_rl.data.prompts import check_files
from megatron_rl.errors import DataError
from tests.fuzz import deep, mutated, mutated_bytes, mutations, taken_or_refused

DATA = DataConfig(reward_fields=["deep.truth"], images_field="images")
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": "image", "image": "a.png"}]},
    {"role": "user", "content": [{"type": "video", "frames": ["a.png", "a.png"], "timestamps": [0.0, 1.5]}]},
]
ROWS = [
    {"id": "a", "prompt": "1+1=", "answer": "2", "type": "math", "deep": {"truth": [1, {"x": 2}]}},
    {"id": 7, "prompt": "<image> What is it?", "answer": 3.5, "images": ["a.png"], "deep": {"truth": "é"}},
    {"prompt": CHAT, "answer": "x", "images": None, "deep": {"truth": None}},
]
PREFERENCE = {"prompt": "1+1=", "chosen": "2", "rejected": "3", "response": "a = 1\n", "line_labels": [1]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    from PIL import Image

    Image.new("RGB", (3, 2)).save(folder / "a.png")
    return folder


def refusal(folder, content: bytes, name="rows.jsonl") -> str:
    (folder / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        check_files([str(folder / name)], DataConfig())
    return str(error.value)


GOOD = b'{"prompt": "1+1=", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (b'{"prompt": "a\\ud800b", "answer": "2"}', "field 'prompt': a text contains half of a surrogate pair"),
        (b'{"prompt": "1", "answer": "2", "more": [{"\\udc00": 1}]}', "field 'more': a text contains half of a surrogate pair"),
        (b'{"prompt": "\xff", "answer": "2"}', "not UTF-8 text"),
        (b'{"prompt": "1", "answer": Infinity}', "field 'answer': expected text or a number, got float 'inf'"),
        (b'{"prompt": "1", "answer": -1e999}', "field 'answer': expected text or a number, got float '-inf'"),
        (b'{"prompt": "1", "answer": NaN}', "field 'answer': expected text or a number"),
        (b'{"prompt": "1", "answer": true}', "field 'answer': expected text or a number, got bool"),
        (b'{"prompt": "1", "answer": " "}', "field 'answer': expected text or a number, got empty text"),
        (b'{"prompt": " \\n", "answer": "2"}', "field 'prompt': expected non-empty text"),
        (b'{"prompt": "1", "prompt": "2", "answer": "2"}', "field 'prompt' occurs twice in an object"),
        (b'{"prompt": "1", "answer": "2", "x": ' + json.dumps(deep(100)).encode() + b"}", "nested deeper than 64"),
        (b'{"prompt": "1", "answer": ' + b"[" * 100_000 + b"}", "not valid JSON"),
        (b'{"prompt": "1", "answer": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b'{"prompt": 5, "answer": "2"}', "field 'prompt': expected non-empty text, got int"),
    ],
)
def test_unusable_row_is_rejected_with_file_line_and_field(folder, second, words):
    message = refusal(folder, GOOD + second + b"\n")
    assert f"{folder}/rows.jsonl:2: " in message and words in message


def test_utf_8_byte_order_mark_is_accepted_and_utf_16_reported(folder):
    for name, content in (("rows.jsonl", GOOD * 2), ("rows.json", b"[" + GOOD + b"]")):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + content)
        assert check_files([str(folder / name)], DataConfig())
        assert "UTF-16; convert it" in refusal(folder, content.decode().encode("utf-16"), name)
    assert "in line 3" in refusal(folder, b"[" + GOOD + b'\n,{"prompt": "\xff"}]', "rows.json")


def test_pipe_is_rejected_because_it_can_be_read_only_once(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe is a pipe or device, not a file"):
        check_files([str(tmp_path / "pipe")], DataConfig())


@mutations(150)
@given(data=st.data())
def test_damaged_rows_are_read_or_rejected(folder, data):
    rows = data.draw(mutated(ROWS, at_most=3))
    file = folder / data.draw(st.sampled_from(["mutated.jsonl", "mutated.json"]))
    as_lines = file.suffix == ".jsonl" and isinstance(rows, list)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) if as_lines else json.dumps(rows))
    with taken_or_refused(f"{file}:", str(file), "data.reward_fields"):
        check_files([str(file)], DATA, takes_images=True)


@mutations(150)
@given(data=st.data())
def test_damaged_files_are_read_or_rejected(folder, data):
    name = data.draw(st.sampled_from(["rows.jsonl", "rows.json", "rows.jsonl.gz", "rows.parquet", "rows.arrow"]))
    content = data.draw(mutated_bytes(whole_file(folder / "whole" / name)))
    file = folder / f"damaged-{name}"
    file.write_bytes(content)
    with taken_or_refused(str(file), "data.reward_fields"):
        check_files([str(file)], DataConfig())


def test_a_field_with_an_endless_name_is_shown_by_its_start(tmp_path):
    """As in a damaged file, whose text became a name."""
    for row in ({"prompt": "1+1="}, {"answer": "2"}):
        (tmp_path / "rows.jsonl").write_text(json.dumps({**row, "[" * 9000: 1}))
        with taken_or_refused("fields here are ["):
            check_files([str(tmp_path / "rows.jsonl")], DataConfig())


def test_arrow_file_with_a_damaged_byte_does_not_crash_the_process(folder):
    whole = whole_file(folder / "whole" / "rows.arrow")
    file = folder / "damaged.arrow"
    for place in range(len(whole)):
        for byte in (0xFF, whole[place] ^ 1):
            file.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
            with taken_or_refused(str(file), "data.reward_fields"):
                check_files([str(file)], DataConfig())


@mutations(100)
@given(data=st.data())
def test_columns_of_other_types_are_read_or_rejected(folder, data):
    kinds = [
        pa.int64(),
        pa.float32(),
        pa.bool_(),
        pa.binary(),
        pa.date32(),
        pa.list_(pa.int8()),
        pa.null(),
        pa.decimal128(25, 2),
    ]
    kinds += [
        pa.struct([("a", pa.string())]),
        pa.timestamp("ns"),
        pa.map_(pa.string(), pa.int8()),
        pa.dictionary(pa.int8(), pa.string()),
    ]
    columns = {"prompt": pa.array(["1+1=", "2"]), "answer": pa.array(["2", "3"]), "id": pa.array(["a", "b"])}
    for name in data.draw(st.lists(st.sampled_from([*columns, "type", "images"]), min_size=1, max_size=2)):
        columns[name] = odd_column(data.draw(st.sampled_from(kinds)))
    file = folder / "columns.parquet"
    pq.write_table(pa.table(columns), file)
    with taken_or_refused(f"{file}:"):
        check_files([str(file)], DataConfig(), takes_images=True)


@mutations(100)
@given(data=st.data())
def test_damaged_preferences_are_read_or_rejected(folder, data):
    row = data.draw(mutated(PREFERENCE))
    file = folder / "preferences.jsonl"
    file.write_text(json.dumps(PREFERENCE) + "\n" + json.dumps(row) + "\n")
    config = Config()
    config.reward_train.kind = data.draw(st.sampled_from(type(config.reward_train.kind)))
    config.reward_train.train_files, config.reward_train.output_path = [str(file)], str(folder / "out")
    with taken_or_refused(f"{file}:"):
        check_reward_files(config)


def whole_file(path: Path) -> bytes:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "id": str(i)} for i in range(4)]
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(str(path), pa.Table.from_pylist(rows).schema) as writer:
            writer.write_table(pa.Table.from_pylist(rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    return path.read_bytes()


def odd_column(kind: pa.DataType) -> pa.Array:
    if pa.types.is_binary(kind):
        return pa.array([b"\xff", b"2"], kind)
    if pa.types.is_dictionary(kind):
        return pa.array(["a", "b"]).dictionary_encode()
    if pa.types.is_floating(kind):
        return pa.array([float("nan"), float("inf")], kind)
    if pa.types.is_map(kind):
        return pa.array([[("a", 1)], []], kind)
    if pa.types.is_struct(kind):
        return pa.array([{"a": "x"}, None], kind)
    if pa.types.is_list(kind):
        return pa.array([[1], []], kind)
    return (
        pa.array([None, None], kind)
        if pa.types.is_null(kind)
        else pa.array([1, 0]).cast(pa.int32()).cast(kind)
        if pa.types.is_date(kind)
        else pa.array([1, 0]).cast(kind)
    )
