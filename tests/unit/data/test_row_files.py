"""Every file format gives the same rows, each with its source; errors report location and reason."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.row_files import ROWS_PER_BATCH, lookup, not_json, read_rows
from megatron_rl.errors import DataError

ROWS = [{"id": f"r{i}", "prompt": f"{i}+1=", "answer": i + 1, "deep": {"truth": str(i)}} for i in range(5)]


def json_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_arrow(path, rows, *, stream=True):
    table = pa.Table.from_pylist(rows)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_saved_dataset(folder, shards, **state):
    """Write the files of datasets.save_to_disk."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        write_arrow(folder / name, rows)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names], **state}))
    (folder / "dataset_info.json").write_text("{}")


def write_jsonl(folder):
    (folder / "rows.jsonl").write_text(json_lines(ROWS))
    return folder / "rows.jsonl"


def write_gzip(folder):
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(json_lines(ROWS).encode()))
    return folder / "rows.jsonl.gz"


def write_array(folder):
    (folder / "rows.json").write_text("\n " + json.dumps(ROWS, indent=1))
    return folder / "rows.json"


def write_parquet(folder):
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet", row_group_size=2)
    return folder / "rows.parquet"


def write_arrow_stream(folder):
    write_arrow(folder / "rows.arrow", ROWS)
    return folder / "rows.arrow"


def write_arrow_file(folder):
    write_arrow(folder / "rows.arrow", ROWS, stream=False)
    return folder / "rows.arrow"


def write_dataset(folder):
    write_saved_dataset(folder / "saved", [ROWS[:3], ROWS[3:]])
    return folder / "saved"


def write_dataset_dict(folder):
    write_saved_dataset(folder / "dict" / "train", [ROWS])
    write_saved_dataset(folder / "dict" / "test", [ROWS[:1]])
    (folder / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return folder / "dict"


def write_hub_folder(folder):
    data = folder / "hub" / "data"
    data.mkdir(parents=True)
    for name, rows in (("train-00000-of-00002", ROWS[:2]), ("train-00001-of-00002", ROWS[2:]), ("test-00000", ROWS)):
        pq.write_table(pa.Table.from_pylist(rows), data / f"{name}.parquet")
    (folder / "hub" / ".cache").mkdir()
    (folder / "hub" / ".cache" / "train.jsonl").write_text("not data")
    return folder / "hub"


FORMATS = [
    write_jsonl,
    write_gzip,
    write_array,
    write_parquet,
    write_arrow_stream,
    write_arrow_file,
    write_dataset,
    write_dataset_dict,
    write_hub_folder,
]


@pytest.mark.parametrize("write", FORMATS)
def test_every_format_gives_the_same_rows_and_unique_sources(tmp_path, write):
    name = str(write(tmp_path))
    pairs = list(read_rows([name]))
    assert [row for row, _ in pairs] == ROWS
    assert [place for _, place in pairs] == [place for _, place in read_rows([name])]
    unit = "" if write in (write_jsonl, write_gzip) else "row "
    assert [place for _, place in pairs] == [f"{name}:{unit}{i}" for i in range(1, 6)]


def test_rows_are_numbered_over_batches(tmp_path):
    rows = [{"id": i} for i in range(2 * ROWS_PER_BATCH + 5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "many.parquet")
    *_, (row, place) = read_rows([str(tmp_path / "many.parquet")])
    assert row["id"] == len(rows) - 1 and place.endswith(f":row {len(rows)}")


def test_a_split_is_chosen_by_name_and_a_missing_one_lists_the_others(tmp_path):
    saved, hub = str(write_dataset_dict(tmp_path)), str(write_hub_folder(tmp_path))
    assert len(list(read_rows([saved], split="test"))) == 1
    assert len(list(read_rows([hub], split="test"))) == 5
    for folder in (saved, hub):
        with pytest.raises(DataError, match="no split 'dev'; its splits are .*test.*data.split"):
            list(read_rows([folder], split="dev"))


def test_folder_without_split_names_is_read_whole(tmp_path):
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "b.jsonl").write_text(json_lines(ROWS[2:]))
    (folder / "a.jsonl").write_text(json_lines(ROWS[:2]))
    (folder / "README.md").write_text("not data")
    assert [row for row, _ in read_rows([str(folder)])] == ROWS


def cut(path, num_bytes):
    path.write_bytes(path.read_bytes()[:num_bytes])
    return path


def text(path, content):
    path.write_text(content)
    return path


def indices(folder):
    write_saved_dataset(folder, [ROWS], _indices_data_files=[{"filename": "indices.arrow"}])
    return folder


def lost_shard(folder):
    write_saved_dataset(folder, [ROWS, ROWS])
    (folder / "data-00001-of-00002.arrow").unlink()
    return folder


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: f / "nothing.jsonl", "does not exist; give the path"),
        (lambda f: text(f / "a.jsonl", '{"a": 1}\n{"a"'), "a.jsonl:2: not valid JSON"),
        (lambda f: text(f / "a.jsonl", '{"a": 1}\n3\n'), "a.jsonl:2: expected a JSON object, got int"),
        (lambda f: text(f / "a.jsonl", "[" * 100_000), "a.jsonl:1: not valid JSON"),
        (lambda f: text(f / "a.json", '[{"a": 1}, 3]'), "a.json:row 2: expected a JSON object, got int"),
        (lambda f: text(f / "a.json", '[{"a": 1}'), "a.json: not valid JSON"),
        (lambda f: cut(write_gzip(f), 60), "incomplete gzip file"),
        (lambda f: text(f / "a.jsonl.gz", "{}"), "incomplete gzip file"),
        (lambda f: cut(write_parquet(f), 300), "incomplete or damaged Parquet file"),
        (lambda f: text(f / "a.parquet", "{}"), "incomplete or damaged Parquet file"),
        (lambda f: cut(write_arrow_stream(f), 1300), "incomplete or damaged Arrow file"),
        (lambda f: text(f / "a.arrow", "{}"), "incomplete or damaged Arrow file"),
        (lambda f: indices(f / "saved"), "flatten_indices"),
        (lambda f: lost_shard(f / "saved"), "data-00001-of-00002.arrow, which is missing"),
        (lambda f: f, "no data files"),
    ],
)
def test_unreadable_files_are_reported_with_location_and_reason(tmp_path, make, message):
    with pytest.raises(DataError, match=message):
        list(read_rows([str(make(tmp_path))]))


def test_fields_may_be_nested_and_a_column_with_a_dot_comes_first():
    row = {"a": {"b": 1}, "a.c": 2, "turns": [{"text": "hi"}]}
    values = [lookup(row, field) for field in ("a.b", "a.c", "turns.0.text", "turns.1.text", "a.b.x", "none", "a.x.y")]
    assert values == [1, 2, "hi", None, None, None, None]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(json_values)
def test_json_values_are_recognized(value):
    assert not_json(value) == "" and json.loads(json.dumps(value)) == value


@pytest.mark.parametrize("value", [b"x", {1: 2}, [float("nan")], {"a": [object()]}, float("inf")])
def test_other_values_are_not_json(value):
    assert not_json(value)
