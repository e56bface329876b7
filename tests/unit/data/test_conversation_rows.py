"""Masks of conversations: equal to TRL's on the styles of public templates; what a template changes or hides is told."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.schema import DataConfig, TrainTurns
from megatron_rl.data.conversation_rows import check_supervised_files, load_sequences
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.errors import DataError
from megatron_rl.supervised.fine_tuning import sequence_batch
from tests.fuzz import mutated, mutations, taken_or_refused
from tests.unit.data.template_styles import STYLES, Style, conversations, make_tokenizer

GOLDEN = json.loads(Path(__file__).with_name("conversation_masks_trl.json").read_text())
DATA = DataConfig(messages_field="messages")
CHAT = [
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "I am a model."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Farewell"},
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    made = {}

    def get(style: Style | str) -> Tokenizer:
        key = style if isinstance(style, str) else style.template
        if key not in made:
            folder = tmp_path_factory.mktemp("style")
            make_tokenizer(STYLES[style] if isinstance(style, str) else style).save_pretrained(folder)
            made[key] = Tokenizer(folder)
        return made[key]

    return get


@pytest.fixture
def load(tmp_path):
    """(sequences, notes) of rows."""

    def load(tokenizer, *rows, data=DATA, turns=TrainTurns.all):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert check_supervised_files([str(file)], data) == len(rows)
        return load_sequences([str(file)], data, tokenizer, turns=turns)

    return load


def trained_texts(tokenizer, sequence):
    """Text of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(sequence.mask.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [tokenizer.raw_text(sequence.token_ids[start:end]) for start, end in edges]


@pytest.mark.parametrize("name", STYLES)
def test_ids_and_masks_equal_those_of_trl(name, tokenizers, load):
    style = STYLES[name]
    for row, golden in zip(conversations(style), GOLDEN[name], strict=True):
        sequences, notes = load(tokenizers(name), row)
        by_ids = {tuple(one["ids"]): one["runs"] for one in golden}
        assert len(sequences) == 1 or style.changes_turns
        num_trained = 0
        for sequence in sequences:
            runs = np.flatnonzero(np.diff(sequence.mask.astype(int), prepend=0, append=0)).reshape(-1, 2).tolist()
            # Turns that are trained in another sequence are masked here; TRL has no such sequences.
            assert runs == by_ids[tuple(sequence.token_ids)][-len(runs) :]
            num_trained += len(runs)
        assert num_trained == sum(message["role"] == "assistant" for message in row["messages"])
        assert any("changes earlier turns" in note for note in notes) == (len(sequences) > 1)


@pytest.mark.parametrize("name", [name for name, style in STYLES.items() if style.changes_turns])
def test_turns_that_a_template_changes_train_in_the_context_they_are_generated_from(name, tokenizers, load):
    tokenizer = tokenizers(name)
    row = max(conversations(STYLES[name]), key=lambda row: len(str(row)))
    for number, sequence in enumerate(load(tokenizer, row)[0]):
        first = int(np.flatnonzero(sequence.mask)[0])
        contexts = [
            tokenizer.encode_prompt(row["messages"][:end], chat=True, arguments={"tools": row.get("tools")})
            for end in range(len(row["messages"]))
            if row["messages"][end]["role"] == "assistant"
        ]
        assert list(sequence.token_ids[:first]) in contexts, number


def test_thoughts_of_every_turn_are_trained_by_a_template_that_drops_earlier_ones(tokenizers, load):
    thinking = [m | {"reasoning_content": f"thought {i}"} if m["role"] == "assistant" else m for i, m in enumerate(CHAT)]
    tagged = [m | {"content": f"<think>\nthought {i}\n</think>\n\n{m['content']}"} if i % 2 else m for i, m in enumerate(CHAT)]
    expected = [f"<think>\nthought {i}\n</think>\n\n{CHAT[i]['content']}<|im_end|>\n" for i in (3, 1)]
    for messages in (thinking, tagged):
        sequences, notes = load(tokenizers("qwen3"), {"messages": messages})
        assert [text for one in sequences for text in trained_texts(tokenizers("qwen3"), one)] == expected
        assert len(notes) == 1 and "of 1 conversations: 1 conversations in which the chat template changes" in notes[0]


def test_weight_zero_and_the_last_turn_choose_what_is_trained(tokenizers, load):
    tokenizer = tokenizers("chatml")
    masked = [CHAT[0], CHAT[1] | {"weight": 0}, *CHAT[2:]]
    first = [CHAT[0], CHAT[1] | {"weight": 1}, CHAT[2], CHAT[3] | {"weight": 0}]
    for messages, turns, expected in (
        (CHAT, TrainTurns.all, ["I am a model.<|im_end|>\n", "Farewell<|im_end|>\n"]),
        (CHAT, TrainTurns.last, ["Farewell<|im_end|>\n"]),
        (masked, TrainTurns.all, ["Farewell<|im_end|>\n"]),
        (first, TrainTurns.last, ["I am a model.<|im_end|>\n"]),
    ):
        ((sequence,), notes) = load(tokenizer, {"messages": messages}, turns=turns)
        assert trained_texts(tokenizer, sequence) == expected and not notes


def test_sharegpt_rows_give_the_sequences_of_openai_rows(tokenizers, load):
    row = next(row for row in conversations(STYLES["qwen25"]) if "tools" in row)
    names = {"user": "human", "assistant": "gpt", "tool": "observation", "system": "system"}
    turns = [
        {"from": "function_call", "value": json.dumps(m["tool_calls"][0]["function"])}
        if m.get("tool_calls")
        else {"from": names[m["role"]], "value": m["content"]}
        for m in row["messages"]
    ]
    ((one,), _) = load(tokenizers("qwen25"), row)
    shared = {"conversations": turns, "tools": json.dumps(row["tools"])}
    ((two,), _) = load(tokenizers("qwen25"), shared, data=DataConfig(messages_field="conversations"))
    assert list(one.token_ids) == list(two.token_ids) and one.mask.tolist() == two.mask.tolist()


def test_arguments_of_tool_calls_may_be_json_text_as_openai_writes_them(tokenizers, load):
    row = next(row for row in conversations(STYLES["llama31"]) if "tools" in row)
    as_text = json.loads(json.dumps(row))
    as_text["messages"][1] |= {"content": None, "refusal": None}
    function = as_text["messages"][1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    one, two = (load(tokenizers("llama31"), given)[0][0] for given in (row, as_text))
    assert list(one.token_ids) == list(two.token_ids)


def test_rows_without_messages_train_on_their_response_in_the_same_file(tokenizers, load):
    tokenizer = tokenizers("chatml")
    sequences, _ = load(tokenizer, {"messages": CHAT}, {"prompt": "Hello", "response": "Bye"})
    assert trained_texts(tokenizer, sequences[1]) == ["Bye<|im_end|>"]
    batch = sequence_batch(sequences)
    assert batch.fields["mask"].tolist() == [bool(value) for one in sequences for value in one.mask]


def test_system_prompt_and_template_arguments_of_the_recipe_apply(tokenizers, load):
    tokenizer = tokenizers("qwen3")
    data = DataConfig(
        messages_field="messages", use_chat_template=True, system_prompt="Be brief.", chat_template_kwargs={"enable_thinking": False}
    )
    ((sequence,), notes) = load(tokenizer, {"messages": CHAT[:2]}, data=data)
    text = tokenizer.raw_text(sequence.token_ids)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n") and not notes
    # The empty thought is part of the prompt.
    assert trained_texts(tokenizer, sequence) == ["I am a model.<|im_end|>\n"]


class TestNotes:
    def test_thoughts_that_the_template_leaves_out_are_counted(self, tokenizers, load):
        messages = [CHAT[0], CHAT[1] | {"content": "<think>\nwhy</think>I am a model."}]
        (_, notes) = load(tokenizers("deepseek_r1"), {"messages": messages}, {"messages": CHAT[:2]})
        assert any("of 2 conversations: 1 trained turns whose thoughts the chat template leaves out" in note for note in notes)

    def test_turns_that_start_otherwise_are_counted_and_trained_from_their_first_own_token(self, tokenizers, load):
        messages = [CHAT[0], {"role": "assistant", "content": "<tool> first"}]
        ((sequence,), notes) = load(tokenizers("deepseek_r1"), {"messages": messages})
        assert trained_texts(tokenizers("deepseek_r1"), sequence) == ["<tool> first<|end_of_sentence|>"]
        assert any("1 trained turns that do not start as the template prompts" in note for note in notes)

    def test_turns_without_an_end_are_counted(self, tokenizers, load):
        open_end = Style("{% for m in messages %}<u>{{ m.content }}<a>{% endfor %}", ("<u>", "<a>"))
        no_end = Style(open_end.template.replace("<a>", "{% if m.role == 'user' %}<a>{% endif %}"), ("<u>", "<a>"))
        assert not [note for note in load(tokenizers(open_end), {"messages": CHAT[:2]})[1] if "does not close" in note]
        assert [note for note in load(tokenizers(no_end), {"messages": CHAT[:2]})[1] if "does not close" in note]

    def test_a_token_over_the_start_of_a_turn_is_counted(self, tokenizers, load):
        messages = [CHAT[0], {"role": "assistant", "content": "See you"}]
        ((sequence,), notes) = load(tokenizers("chatml"), {"messages": messages})
        assert trained_texts(tokenizers("chatml"), sequence) == ["\nSee you<|im_end|>\n"]
        assert any("1 trained turns whose first token also has the end of the prompt" in note for note in notes)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "expected a list of messages"),
        ("Hello", "expected an object or a list, or JSON of one"),
        ([*CHAT[:1], "hm"], "message 2: expected an object with role and content"),
        ([{"role": "robot", "content": "x"}], "message 1: role: expected one of system, developer"),
        ([CHAT[0]], "expected a turn of the assistant to train, got none"),
        ([CHAT[0], CHAT[1] | {"weight": 0}], "expected a turn of the assistant to train, got none"),
        ([CHAT[0], CHAT[1] | {"weight": 0.5}], "message 2: weight: expected 0"),
        ([CHAT[0], {"role": "assistant", "content": " "}], "message 2: content: expected non-empty text"),
        ([CHAT[0], {"role": "assistant", "tool_calls": [{"function": {}}]}], "message 2: tool_calls: expected a function with name"),
        (
            [CHAT[0], {"role": "assistant", "tool_calls": [{"name": "add", "arguments": "{"}]}],
            "message 2: tool_calls: arguments of add: expected JSON",
        ),
        ([CHAT[0], {"from": "function_call", "value": "add"}], "message 2: value of a function_call: expected JSON"),
    ],
)
def test_bad_conversations_are_refused_with_their_place(messages, reason, tokenizers, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(DataError) as error:
        check_supervised_files([str(file)], DATA)
    assert reason in str(error.value) and "rows.jsonl:1: field 'messages'" in str(error.value)


@pytest.mark.parametrize(
    ("name", "messages", "reason"),
    [
        ("gemma", [{"role": "system", "content": "x"}, *CHAT], "message 5 of the conversation"),
        ("llama2", [CHAT[0], CHAT[0], CHAT[1]], "roles must alternate"),
        ("chatml", [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}], "the chat template leaves out"),
        ("llama31", [CHAT[0], {"role": "assistant", "content": "Sum", "tool_calls": [{"name": "add"}]}], "leaves out str 'Sum'"),
    ],
)
def test_conversations_that_a_template_cannot_show_are_refused(name, messages, reason, tokenizers, load):
    with pytest.raises(DataError) as error:
        load(tokenizers(name), {"messages": messages})
    assert reason in str(error.value) and "rows.jsonl:1" in str(error.value), error.value


# A result of a tool ends with a line break only if a turn follows (Hermes); earlier thoughts go once an answer follows (gpt-oss).
_CLOSED_LATER = (
    "{% for m in messages %}<u>{{ m.thinking + '<t>' if m.thinking and loop.last else '' }}"
    "{{ m.content }}{{ '' if loop.last else '\n' }}<a>{% endfor %}{% if add_generation_prompt and prompts %}<u>{% endif %}"
)


def test_turns_that_change_the_text_before_them_train_in_the_context_that_they_are_generated_from(tokenizers, load):
    tokenizer = tokenizers(Style(_CLOSED_LATER.replace(" and prompts", ""), ("<t>", "<u>", "<a>")))
    sequences, notes = load(tokenizer, {"messages": [*CHAT[:3], CHAT[3] | {"thinking": "<u>"}]})
    assert [tokenizer.raw_text(one.token_ids) for one in sequences] == [
        "<u>Hello?\n<a><u>I am a model.\n<a><u>Bye<a><u><u><t>Farewell<a>", "<u>Hello?<a><u>I am a model.<a>",
    ]  # fmt: skip
    assert [trained_texts(tokenizer, one) for one in sequences] == [["<u><t>Farewell<a>"], ["I am a model.<a>"]]
    assert any("changes earlier turns" in note for note in notes)


def test_template_without_a_prompt_that_changes_the_messages_before_a_turn_is_refused(tokenizers, load):
    with pytest.raises(DataError, match="changes the messages before this turn when the turn is added"):
        load(tokenizers(Style(_CLOSED_LATER, ("<t>", "<u>", "<a>"))), {"messages": CHAT})


@mutations(60)
@given(data=st.data())
def test_damaged_conversations_are_read_or_refused(data, tokenizers, tmp_path_factory):
    name = data.draw(st.sampled_from(["qwen3", "llama31", "chatml"]))
    shared = {"messages": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Bye", "weight": 1}]}
    rows = data.draw(mutated([*conversations(STYLES[name]), shared], at_most=3))
    file = tmp_path_factory.mktemp("damaged") / "rows.json"
    file.write_text(json.dumps(rows))
    with taken_or_refused(str(file)):
        load_sequences([str(file)], DATA, tokenizers(name))
