"""Prompt files: invalid rows are rejected with file, line and field."""

import json
import re

import pytest
import torch

from megatron_rl.config.schema import DataConfig, DuplicateIds
from megatron_rl.data.batch import Images, PackedBatch, cu_seqlens_of
from megatron_rl.data.conversation_rows import check_supervised_files, load_sequences
from megatron_rl.data.prompts import check_files, load_prompts
from megatron_rl.data.row_files import read_rows
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.errors import DataError
from tests.tiny_models import make_tiny_model, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(make_tiny_model(tmp_path_factory.mktemp("data") / "model"))


def write(tmp_path, *rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return [str(file)]


def load(files, tokenizer, limit=100, **fields):
    return load_prompts(files, DataConfig(**fields), tokenizer, max_prompt_tokens=limit)


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    make_tokenizer(folder)
    template = (
        "{% for m in messages %}{% if loop.index0 > 0 and m.role == messages[loop.index0 - 1].role %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}({{ m.role }} {{ m.content }}){% endfor %}"
        "{% if add_generation_prompt %}(A{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder)


def test_prompts_keep_ids_answers_and_sources(tmp_path, tokenizer):
    files = write(tmp_path, {"id": "a", "prompt": "1+1=", "answer": 2}, "", {"prompt": "2+2=", "answer": "4"})
    one, two = load(files, tokenizer).prompts
    assert (one.id, one.answer, tokenizer.decode(one.token_ids)) == ("a", "2", "1+1=")
    assert two.id == f"{files[0]}:3" == two.source


def test_a_prompt_is_encoded_once(tmp_path, tokenizer, monkeypatch):
    encoded, encode = [], tokenizer._tokenizer.encode
    monkeypatch.setattr(tokenizer._tokenizer, "encode", lambda text, **options: encoded.append(text) or encode(text, **options))
    load(write(tmp_path, {"prompt": "1+1=", "answer": 2}, {"prompt": "2+2=", "answer": 4}), tokenizer)
    assert encoded == ["1+1=", "2+2="]


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
        ({"prompt": "1+1=", "answer": ""}, "field 'answer': expected text or a number, got empty text"),
        ({"prompt": "1+1=", "answer": "2", "id": [1]}, "field 'id'"),
        ({"prompt": "1+1=", "answer": "2", "type": 3}, "field 'type'"),
        ({"prompt": [], "answer": "2"}, "field 'prompt': expected messages"),
        ({"prompt": ["1+1="], "answer": "2"}, "field 'prompt': message 1: expected an object with role and content"),
        ({"prompt": [{"role": "user"}], "answer": "2"}, "message 1: content: expected non-empty text, got nothing"),
        (
            {"prompt": [{"role": "assistant", "content": "2"}], "answer": "2"},
            "the model answers (user), got assistant",
        ),
        ({"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}, "field 'prompt': .*no chat template"),
        ({"prompt": "1+1=€", "answer": "2"}, "does not know '€'"),
    ],
)
def test_invalid_row_is_rejected_with_file_line_and_field(tmp_path, tokenizer, row, expected):
    files = write(tmp_path, {"prompt": "1+1=", "answer": "2"}, row)
    with pytest.raises(DataError) as error:
        load(files, tokenizer)
    assert f"{files[0]}:2" in str(error.value)
    assert expected in str(error.value) or re.search(expected, str(error.value))


def test_duplicate_ids_missing_files_and_wrong_encodings_are_errors(tmp_path, tokenizer):
    row = {"id": "a", "prompt": "1+1=", "answer": "2"}
    with pytest.raises(DataError, match="is already used at"):
        load(write(tmp_path, row, row), tokenizer)
    with pytest.raises(DataError, match="does not exist"):
        load(["/nowhere.jsonl"], tokenizer)
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8"):
        list(read_rows([str(tmp_path / "latin.jsonl")]))


def test_file_given_twice_has_duplicate_ids(tmp_path, tokenizer):
    files = write(tmp_path, {"prompt": "1+1=", "answer": "2"})
    with pytest.raises(DataError, match="is already used at"):
        load([*files, *files], tokenizer)


def test_duplicate_ids_may_be_dropped_and_are_counted(tmp_path, tokenizer):
    rows = [{"id": i, "prompt": f"{n}=", "answer": "2"} for n, i in enumerate("abaab")]
    prompts = load(write(tmp_path, *rows), tokenizer, duplicate_ids=DuplicateIds.drop)
    assert [p.text for p in prompts.prompts] == ["0=", "1="] and prompts.num_duplicates == 3


def test_fields_are_mapped_including_nested_ones(tmp_path, tokenizer):
    row = {
        "data_source": "math",
        "q": {"text": "1+1="},
        "reward_model": {"ground_truth": 2},
        "extra_info": {"index": 17},
        "tests": ["assert 1"],
        "other": None,
    }
    (prompt,) = load(
        write(tmp_path, row),
        tokenizer,
        id_field="extra_info.index",
        prompt_field="q.text",
        answer_field="reward_model.ground_truth",
        type_field="data_source",
        reward_fields=["tests", "reward_model.ground_truth", "other", "absent"],
    ).prompts
    assert (prompt.id, prompt.text, prompt.answer, prompt.type) == ("17", "1+1=", "2", "math")
    assert prompt.fields == {"tests": ["assert 1"], "ground_truth": 2}


def test_answers_may_be_missing_where_none_is_required(tmp_path, tokenizer):
    files = write(tmp_path, {"prompt": "1+1="}, {"prompt": "1+2=", "answer": ""}, {"prompt": "1+3=", "answer": "4"})
    assert [p.answer for p in load(files, tokenizer, answer_required=False).prompts] == ["", "", "4"]


def test_reward_fields_with_the_same_name_are_rejected(tmp_path, tokenizer):
    files = write(tmp_path, {"prompt": "1+1=", "answer": "2", "a": {"x": 1}, "b": {"x": 2}})
    with pytest.raises(DataError, match="two fields are named 'x'"):
        load(files, tokenizer, reward_fields=["a.x", "b.x"])


def test_check_files_counts_types_and_finds_reward_fields_that_no_row_has(tmp_path):
    rows = [{"prompt": "1=", "answer": "1", "type": t} for t in ("math", "code", "math")]
    rows[1]["tests"] = "assert 1"
    files = write(tmp_path, *rows)
    assert check_files(files, DataConfig(reward_fields=["tests"])) == {"math": 2, "code": 1}
    with pytest.raises(DataError, match="data.reward_fields: no row of .* has test;"):
        check_files(files, DataConfig(reward_fields=["test"]))


def chat(content, role="user"):
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("prompt", "fields", "rendered", "text"),
    [
        ("1+1=", {"use_chat_template": True}, "(user 1+1=)(A", "1+1="),
        ("1+1=", {"use_chat_template": True, "system_prompt": "add"}, "(system add)(user 1+1=)(A", "1+1="),
        ("1+1=", {}, "1+1=", "1+1="),
        ([chat("1+1=")], {}, "(user 1+1=)(A", "1+1="),
        ("1+1=", {"use_chat_template": True, "instruction": "add {prompt}"}, "(user add 1+1=)(A", "add 1+1="),
        ("1+1=", {"instruction": "1+{prompt}"}, "1+1+1=", "1+1+1="),
        ([chat("1+1=")], {"instruction": "add {prompt}"}, "(user 1+1=)(A", "1+1="),
        ([chat("be", "system"), chat("1+1=")], {"system_prompt": "add"}, "(system be)(user 1+1=)(A", "1+1="),
        (
            [chat("1"), chat("2", "assistant"), chat("3")],
            {"system_prompt": "add"},
            "(system add)(user 1)(assistant 2)(user 3)(A",
            "user: 1\n\nassistant: 2\n\nuser: 3",
        ),
    ],
)
def test_messages_are_rendered_by_the_chat_template(tmp_path, chat_tokenizer, prompt, fields, rendered, text):
    (loaded,) = load(write(tmp_path, {"prompt": prompt, "answer": "2"}), chat_tokenizer, **fields).prompts
    assert chat_tokenizer.decode(loaded.token_ids) == rendered and loaded.text == text


def test_messages_that_the_template_rejects_raise_with_their_source(tmp_path, chat_tokenizer):
    files = write(tmp_path, {"prompt": [chat("1"), chat("2")], "answer": "2"})
    with pytest.raises(DataError, match=r"rows.jsonl:1: field 'prompt'.*rejects messages of user, user: roles must"):
        load(files, chat_tokenizer)


def test_too_long_prompts_are_skipped_and_counted_by_type(tmp_path, tokenizer):
    files = write(tmp_path, {"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1+1+1+1=", "answer": "5", "type": "math"})
    prompts = load(files, tokenizer, limit=5)
    assert (prompts.num_too_long, prompts.num_too_long_by_type) == (1, {"math": 1})
    assert prompts.num_by_type == {"": 1}
    with pytest.raises(DataError, match="no prompt is left"):
        load(files, tokenizer, limit=2)


def test_solutions_end_in_the_end_of_text_token(tmp_path, tokenizer):
    files = write(tmp_path, {"prompt": "1+1=", "response": "2"})
    assert check_supervised_files(files, DataConfig()) == 1
    ((sequence,), _) = load_sequences(files, DataConfig(), tokenizer)
    *shown, last = sequence.token_ids
    assert tokenizer.decode(shown) == "1+1=2" and last == tokenizer.eos_id
    assert sequence.mask.tolist() == [False] * 4 + [True] * 2


def test_tokenizer_larger_than_the_models_vocabulary_is_rejected(tmp_path):
    folder = make_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 8}))
    with pytest.raises(DataError, match="vocabulary mismatch.*vocab_size=8"):
        Tokenizer(folder)


def test_select_takes_the_images_of_its_sequences():
    grids = torch.tensor([[1, 2, 2], [2, 2, 2], [1, 2, 4]])
    images = Images.of_patches(torch.arange(20.0)[:, None], grids, torch.tensor([0, 2, 2]))
    batch = PackedBatch(torch.arange(9), cu_seqlens_of(torch.tensor([2, 3, 4])), images=images)
    chosen = batch.select([2, 1, 0]).images
    patches = torch.cat([chosen.patches(image) for image in range(3)])
    assert patches[:, 0].tolist() == [*range(4, 20), *range(4)]
    assert chosen.grids.tolist() == [[2, 2, 2], [1, 2, 4], [1, 2, 2]]
    assert chosen.sequences.tolist() == [0, 0, 2]
    nothing = batch.select([1]).images
    assert len(nothing.sources) == 0 and nothing.grids.shape == (0, 3) and nothing.sequences.tolist() == []


def test_select_takes_whole_sequences_in_the_given_order():
    batch = PackedBatch(torch.arange(9), cu_seqlens_of(torch.tensor([2, 3, 4])), {"x": torch.arange(9) * 10})
    chosen = batch.select([2, 0])
    assert chosen.tokens.tolist() == [5, 6, 7, 8, 0, 1]
    assert chosen.cu_seqlens.tolist() == [0, 4, 6]
    assert chosen.fields["x"].tolist() == [50, 60, 70, 80, 0, 10]
    assert batch.select([]).num_sequences == 0
