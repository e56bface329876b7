"""Prompt files: bad rows are refused with file, line and field."""

import json

import pytest
import torch

from megatron_rl.config.schema import DataConfig
from megatron_rl.data.batch import PackedBatch, cu_seqlens_of
from megatron_rl.data.prompts import load_prompts, load_solutions, read_rows
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.errors import DataError
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(make_tiny_model(tmp_path_factory.mktemp("data") / "model"))


def write(tmp_path, *rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return [str(file)]


def load(files, tokenizer, limit=100):
    return load_prompts(files, DataConfig(), tokenizer, max_prompt_tokens=limit)


def test_prompts_keep_ids_answers_and_places(tmp_path, tokenizer):
    files = write(tmp_path, {"id": "a", "prompt": "1+1=", "answer": 2}, "", {"prompt": "2+2=", "answer": "4"})
    one, two = load(files, tokenizer).prompts
    assert (one.id, one.answer, tokenizer.decode(one.token_ids)) == ("a", "2", "1+1=")
    assert two.id == f"{files[0]}:3" == two.source


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("{broken", "not valid JSON"),
        ("[1, 2]", "expected a JSON object, got list"),
        ({"answer": "2"}, "field 'prompt': expected non-empty text, got nothing"),
        ({"prompt": "", "answer": "2"}, "field 'prompt'"),
        ({"prompt": 7, "answer": "2"}, "field 'prompt': expected non-empty text, got int"),
        ({"prompt": "1+1="}, "field 'answer'"),
        ({"prompt": "1+1=", "answer": [2]}, "field 'answer'"),
        ({"prompt": "1+1=€", "answer": "2"}, "does not know '€'"),
    ],
)
def test_a_bad_row_is_refused_with_file_line_and_field(tmp_path, tokenizer, row, expected):
    files = write(tmp_path, {"prompt": "1+1=", "answer": "2"}, row)
    with pytest.raises(DataError) as error:
        load(files, tokenizer)
    assert f"{files[0]}:2" in str(error.value) and expected in str(error.value)


def test_doubled_ids_missing_files_and_wrong_encodings_are_errors(tmp_path, tokenizer):
    row = {"id": "a", "prompt": "1+1=", "answer": "2"}
    with pytest.raises(DataError, match="already stands at"):
        load(write(tmp_path, row, row), tokenizer)
    with pytest.raises(DataError, match="does not exist"):
        load(["/nowhere.jsonl"], tokenizer)
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8"):
        list(read_rows([str(tmp_path / "latin.jsonl")]))


def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path, tokenizer):
    files = write(tmp_path, {"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1+1+1+1=", "answer": "5"})
    assert load(files, tokenizer, limit=5).num_too_long == 1
    with pytest.raises(DataError, match="no prompt is left"):
        load(files, tokenizer, limit=2)


def test_solutions_end_in_the_end_of_text_token(tmp_path, tokenizer):
    ((prompt, response),) = load_solutions(
        write(tmp_path, {"prompt": "1+1=", "answer": "2", "response": "2"}), DataConfig(), tokenizer
    )
    assert tokenizer.decode(prompt) == "1+1=" and response[-1] == tokenizer.eos_id and len(response) == 2


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused(tmp_path):
    folder = make_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 8}))
    with pytest.raises(DataError, match="vocabulary mismatch.*vocab_size=8"):
        Tokenizer(folder)


def test_select_takes_whole_sequences_in_the_given_order():
    batch = PackedBatch(torch.arange(9), cu_seqlens_of(torch.tensor([2, 3, 4])), {"x": torch.arange(9) * 10})
    chosen = batch.select([2, 0])
    assert chosen.tokens.tolist() == [5, 6, 7, 8, 0, 1]
    assert chosen.cu_seqlens.tolist() == [0, 4, 6]
    assert chosen.fields["x"].tolist() == [50, 60, 70, 80, 0, 10]
    assert batch.select([]).num_sequences == 0
