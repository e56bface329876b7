"""Template arguments of rows: same result as transformers' apply_chat_template, or an error with its source."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from megatron_rl.config.checks.data_settings import prompt_problems
from megatron_rl.config.schema import DataConfig
from megatron_rl.data.prompts import check_files, load_prompts
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Prompt
from megatron_rl.errors import DataError
from megatron_rl.rollout.generation import make_dialogue
from tests.tiny_models import make_tokenizer
from tests.unit.environments.test_environments import Message, Pag

TEMPLATE = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}Tools: <tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages if message.role != 'system' %}<|im_start|>{{ message.role }}
{{ message.content.split('</think>')[-1].lstrip('\\n') }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
"""Like Qwen3's template: tools in the system message, an empty thought before the answer, no earlier thoughts."""
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}}
SUB = {"type": "function", "function": {"name": "sub", "description": "a less b", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("chat")
    make_tokenizer(path)
    from transformers import PreTrainedTokenizerFast

    inner = PreTrainedTokenizerFast.from_pretrained(path)
    inner.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "eos_token": "<|im_end|>"})
    # Single characters: the template's quotes, braces and tags need tokens of their own.
    inner.add_tokens(list('{}"<>/|_'))
    inner.chat_template = TEMPLATE
    inner.save_pretrained(path)
    return Tokenizer(path)


def write(folder, *rows, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps({"answer": "1", **row}) + "\n" for row in rows))
    return [str(path)]


def prompts(files, tokenizer, **data):
    found = load_prompts(files, DataConfig(use_chat_template=True, **data), tokenizer, max_prompt_tokens=10_000)
    return list(found.prompts)


def theirs(tokenizer, text, **arguments):
    """Reference result of transformers."""
    messages = [{"role": "user", "content": text}]
    inner = tokenizer._tokenizer
    return tuple(inner.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **arguments))


def test_rows_with_arguments_tokenize_like_transformers(tokenizer, tmp_path):
    given = [
        {},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"tools": [ADD, SUB]},
        {"tools": [SUB], "chat_template_kwargs": {"enable_thinking": False}},
        {"tools": json.dumps([ADD]), "chat_template_kwargs": '{"enable_thinking": false}'},
        {"tools": None, "chat_template_kwargs": None},
    ]
    files = write(tmp_path, *({"prompt": f"add {i} and 2", **more} for i, more in enumerate(given)))
    wanted = [
        {},
        {"enable_thinking": False},
        {"enable_thinking": True},
        {"tools": [ADD, SUB]},
        {"tools": [SUB], "enable_thinking": False},
        {"tools": [ADD], "enable_thinking": False},
        {},
    ]
    found = prompts(files, tokenizer)
    assert [p.token_ids for p in found] == [theirs(tokenizer, f"add {i} and 2", **w) for i, w in enumerate(wanted)]
    assert len({p.token_ids[-8:] for p in found}) == 2  # with and without the empty thought
    # What rewards and judges see does not change, and checkpoints keep the arguments.
    assert [p.text for p in found] == [f"add {i} and 2" for i in range(len(given))]
    assert [Prompt.from_dict(json.loads(json.dumps(dict(p.to_dict(), token_ids=p.token_ids)))) for p in found] == found


def test_recipe_arguments_apply_to_rows_without_arguments(tokenizer, tmp_path):
    rows = ({"prompt": "a"}, {"prompt": "b", "chat_template_kwargs": {"enable_thinking": True}})
    found = prompts(write(tmp_path, *rows), tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert found[0].token_ids == theirs(tokenizer, "a", enable_thinking=False) != theirs(tokenizer, "a")
    assert found[1].token_ids == theirs(tokenizer, "b", enable_thinking=True)


def test_parquet_columns_lose_keys_of_other_rows(tokenizer, tmp_path):
    rows = [
        {"prompt": "a", "answer": "1", "chat_template_kwargs": {"enable_thinking": False}, "tools": [ADD]},
        {"prompt": "b", "answer": "1", "chat_template_kwargs": {"words": 3}, "tools": [SUB]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = prompts([str(tmp_path / "rows.parquet")], tokenizer)
    assert found[0].chat_arguments == {"enable_thinking": False, "tools": [ADD]}
    assert found[1].chat_arguments == {"words": 3, "tools": [SUB]}


def test_argument_columns_may_have_other_names_or_be_disabled(tokenizer, tmp_path):
    files = write(tmp_path, {"prompt": "a", "tools": "hammer", "extra": {"chat": {"enable_thinking": False}}})
    (found,) = prompts(files, tokenizer, tools_field="", chat_template_kwargs_field="extra.chat")
    assert found.token_ids == theirs(tokenizer, "a", enable_thinking=False)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"chat_template_kwargs": [1]}, r"rows.jsonl:2: field 'chat_template_kwargs': expected an object"),
        ({"chat_template_kwargs": "no"}, r"rows.jsonl:2: field 'chat_template_kwargs': .* or JSON of one, got str 'no'"),
        ({"chat_template_kwargs": {"tokenize": False}}, r"rows.jsonl:2: .*'tokenize' is set by megatron_rl itself"),
        ({"chat_template_kwargs": {"tools": [ADD]}}, r"rows.jsonl:2: .*tools have their own column"),
        ({"tools": {"name": "add"}}, r"rows.jsonl:2: field 'tools': expected a list of JSON schemas"),
        ({"tools": ["add"]}, r"rows.jsonl:2: field 'tools': tool 1: expected"),
        ({"tools": [ADD, {"type": "function"}]}, r"rows.jsonl:2: field 'tools': tool 2: .*without a name"),
    ],
)
def test_invalid_arguments_are_reported_before_a_run_starts(row, said, tmp_path):
    files = write(tmp_path, {"prompt": "fine"}, {"prompt": "bad", **row})
    with pytest.raises(DataError, match=said):
        check_files(files, DataConfig(use_chat_template=True))


def test_arguments_that_would_not_be_read_are_rejected(tmp_path):
    files = write(tmp_path, {"prompt": "text", "chat_template_kwargs": {"enable_thinking": False}})
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*does not go through the chat template"):
        check_files(files, DataConfig())
    # The recipe's are for those prompts that do.
    mixed = write(tmp_path, {"prompt": "text"}, {"prompt": [{"role": "user", "content": "talk"}]})
    check_files(mixed, DataConfig(chat_template_kwargs={"enable_thinking": False}))


def test_arguments_that_the_template_never_reads_are_counted(tokenizer, tmp_path):
    rows = [{"prompt": "a", "chat_template_kwargs": {"enable_thinkin": False}}] * 2 + [{"prompt": "b", "tools": [ADD]}]
    found = load_prompts(
        write(tmp_path, *rows), DataConfig(use_chat_template=True), tokenizer, max_prompt_tokens=10_000
    )
    assert found.num_unread == {"enable_thinkin": 2}


def test_recipe_cannot_set_reserved_arguments():
    assert list(prompt_problems(DataConfig(chat_template_kwargs={"enable_thinking": False}))) == []
    (problem,) = prompt_problems(DataConfig(chat_template_kwargs={"add_generation_prompt": False}))
    assert problem.startswith("data.chat_template_kwargs: 'add_generation_prompt'")


@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}, {"enable_thinking": True, "tools": [ADD]}])
def test_dialogue_messages_use_the_prompts_template_arguments(tokenizer, arguments):
    encode_message = make_dialogue(Pag(), tokenizer, chat=True).encode_message
    history = list(tokenizer.encode_prompt("what is it", chat=True, arguments=arguments))
    history += [*tokenizer.encode("it is 7"), tokenizer.eos_id]
    history += encode_message(Message("sure"), history[-1], arguments)
    messages = [
        {"role": "user", "content": "what is it"},
        {"role": "assistant", "content": "it is 7"},
        {"role": "user", "content": "sure"},
    ]
    whole = tokenizer.encode_prompt(messages, chat=True, arguments=arguments)
    if arguments.get("enable_thinking") is False:
        # The template takes the thoughts of earlier turns out; the history keeps what the model was shown.
        thought = tokenizer.encode("<think>\n\n</think>\n\n")
        start = len(tokenizer.encode_prompt("what is it", chat=True, arguments=arguments))
        assert history[start - len(thought) : start] == thought
        history = history[: start - len(thought)] + history[start:]
    assert history == whole
