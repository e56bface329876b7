"""Laws of reading a turn: what a parser does not understand stays in the answer's text."""

import asyncio
from dataclasses import replace

import pytest

from megatron_rl.agents.chat import ChatRequest, Protocol
from megatron_rl.agents.chat_template import ChatTemplate
from megatron_rl.agents.turn_text import Parsers, parse_turn
from tests.unit.agents.chat_styles import STYLES, TOOLS

STYLE = STYLES["qwen3"]
REQUEST = ChatRequest(Protocol.CHAT, ({"role": "user", "content": "hi"},), tools=tuple(TOOLS))


def read(text, parsers=None, request=REQUEST, stopped=True):
    ids = STYLE.tokenizer.encode(text + "<|im_end|>" * stopped)
    parsed = parse_turn(
        ChatTemplate(STYLE.tokenizer), request, ids, parsers or STYLE.parsers, answer_id="a1", stopped=stopped, num_prompt_tokens=7
    )
    return asyncio.run(parsed), len(ids)


def returns(*value):
    async def parser(*_):
        return value

    return parser


CALL = '<tool_call>\n{"name": "run", "arguments": {"n":1.0}}\n</tool_call>'


def test_turn_is_split_into_thoughts_text_and_calls():
    answer, num_tokens = read(f"<think>\nhm\n</think>\n\nLook.\n{CALL}\n{CALL}")
    assert (answer.thoughts, answer.text, answer.finish) == ("hm", "Look.", "tool_calls")
    assert [(call.name, call.arguments) for call in answer.calls] == [("run", '{"n":1.0}')] * 2
    assert (answer.num_prompt_tokens, answer.num_tokens) == (7, num_tokens)


def test_ids_of_calls_are_nine_letters_and_digits_all_different_and_repeatable():
    (one, _), (again, _) = read(CALL + CALL), read(CALL + CALL)
    ids = [call.id for call in one.calls]
    assert ids == [call.id for call in again.calls]
    assert len(set(ids)) == 2 and all(len(id) == 9 and id.isalnum() for id in ids)


@pytest.mark.parametrize("arguments", ["{", "[1]", "1", '{"a": ' * 70, "{'a': 1}"])
def test_call_whose_arguments_are_no_object_stays_text(arguments):
    answer, _ = read("the text", Parsers(tools=returns("", [("run", '{"a": 1}'), ("run", arguments)])))
    assert (answer.text, answer.calls, answer.finish) == ("the text", (), "stop")


def test_text_that_the_parsers_lose_is_kept():
    lost = returns("", [])
    answer, _ = read("<tool_call>\n{broken\n</tool_call>", Parsers(lost, returns("", "")))
    assert (answer.text, answer.calls) == ("<tool_call>\n{broken\n</tool_call>", ())


def test_calls_stay_text_without_tools_or_if_the_request_wants_none():
    for request in (replace(REQUEST, tools=()), replace(REQUEST, call_tools=False)):
        answer, _ = read(CALL, request=request)
        assert (answer.text, answer.calls) == (CALL, ())


def test_turn_without_stop_token_ends_by_length():
    answer, _ = read("<think>\nhm\n</think>\n\n" + CALL, stopped=False)
    assert (answer.finish, len(answer.calls)) == ("length", 1)


def test_call_without_arguments_has_an_empty_object():
    answer, _ = read("the text", Parsers(tools=returns("", [("run", "")])))
    assert [call.arguments for call in answer.calls] == ["{}"]
