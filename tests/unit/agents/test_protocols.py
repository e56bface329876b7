"""Laws of the protocols: the same conversation in each, answers that come back as they were sent, clear errors."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agents.chat import BadRequest, ChatAnswer, Protocol, ToolCall
from megatron_rl.agents.endpoint import PATHS, answer_body, answer_events, error_body, error_events, parse_request
from tests.unit.agents.chat_styles import TOOLS
from tests.unit.agents.clients import CHAT, CLIENTS

ODD = '{"command":"echo  hi",   "b": 1.0, "a": "\\u00e9\\/"}'
CALLS = (ToolCall("k1", "run", ODD), ToolCall("k2", "edit", "{}"))
ANSWER = ChatAnswer("a1", "Let me look. \n", "  I should look.\n", CALLS, "tool_calls", 10, 5)
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def history(client, answer=ANSWER):
    """A client's second request after this answer."""
    events = [("system", "Be good."), ("user", "hi")]
    body = json.loads(json.dumps(answer_body(parse_request(client.path, client.body(events)), answer)))
    events += [("answer", body), ("results", [(id, f"result of {id}") for id in client.calls(body)])]
    return parse_request(client.path, client.body(events))


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_every_client_and_protocol_gives_the_same_messages(client):
    request = history(client)
    assert [message["role"] for message in request.messages] == ["system", "user", "assistant", "tool", "tool"]
    system, user, said, *results = request.messages
    assert (system["content"], user["content"], said["content"]) == ("Be good.", "hi", ANSWER.text)
    functions = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in CALLS]
    assert [call["function"] for call in said["tool_calls"]] == functions
    assert [(m["tool_call_id"], m["content"]) for m in results] == [("k1", "result of k1"), ("k2", "result of k2")]
    assert said.get("reasoning_content", ANSWER.thoughts) == ANSWER.thoughts
    assert ("reasoning_content" in said) == ("without" not in client.name and "agents" not in client.name)
    assert list(request.tools) == TOOLS
    assert {"k1", "k2"} <= set(request.echoes[2])


def rows_of(request, answer):
    events = b"".join(answer_events(request, answer)).decode()
    assert events.endswith("\n\n")
    return [json.loads(event.partition("data: ")[2]) for event in events.split("\n\n") if event and "[DONE]" not in event], events


def streamed(path, *, answer=ANSWER, **fields):
    first = {"model": "m", "stream": True, **({"input": "hi"} if path == RESPONSES else {"messages": [{"role": "user", "content": "hi"}]})}
    request = parse_request(path, {**first, **({"max_tokens": 9} if path == MESSAGES else {}), **fields})
    assert request.stream
    return request, *rows_of(request, answer)


def test_stream_of_chat_completions_adds_up_to_the_body():
    request, rows, events = streamed(CHAT, stream_options={"include_usage": True})
    whole = answer_body(request, ANSWER)
    said = dict(rows[0]["choices"][0]["delta"])
    assert [call.pop("index") for call in said["tool_calls"]] == [0, 1]
    assert said == whole["choices"][0]["message"]
    assert (rows[1]["choices"][0]["finish_reason"], rows[2]["choices"], rows[2]["usage"]) == ("tool_calls", [], whole["usage"])
    assert events.endswith("data: [DONE]\n\n")
    assert len(streamed(CHAT)[1]) == 2


def test_stream_of_messages_adds_up_to_the_body():
    request, rows, events = streamed(MESSAGES)
    whole, blocks = answer_body(request, ANSWER), []
    for row in rows:
        if row["type"] == "content_block_start":
            blocks.append(dict(row["content_block"]))
        if row["type"] == "content_block_delta":
            for name, value in row["delta"].items():
                if name == "partial_json":
                    blocks[-1]["input"] = json.loads(value)
                elif name != "type":
                    blocks[-1][name] += value
    assert blocks == whole["content"]
    assert rows[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "tool_use"
    assert rows[-2]["usage"] == whole["usage"] == {"input_tokens": 10, "output_tokens": 5}
    assert all(event.startswith("event: ") for event in events.split("\n\n") if event)


def test_stream_of_responses_adds_up_to_the_body():
    request, rows, _ = streamed(RESPONSES)
    assert [row["sequence_number"] for row in rows] == list(range(len(rows)))
    done = [row["item"] for row in rows if row["type"] == "response.output_item.done"]
    assert (rows[-1]["type"], rows[-1]["response"]) == ("response.completed", answer_body(request, ANSWER))
    assert done == rows[-1]["response"]["output"]
    texts = {row["type"]: row["delta"] for row in rows if "delta" in row}
    assert texts["response.output_text.delta"] == ANSWER.text and texts["response.reasoning_text.delta"] == ANSWER.thoughts


@pytest.mark.parametrize(
    "path, field, reason", [(CHAT, "choices", "length"), (MESSAGES, "stop_reason", "max_tokens"), (RESPONSES, "status", "incomplete")]
)
def test_answer_cut_by_length_says_so(path, field, reason):
    request, rows, _ = streamed(path, answer=ChatAnswer("a1", "Hel", finish="length"))
    assert f'"{reason}"' in json.dumps(answer_body(request, ChatAnswer("a1", "Hel", finish="length"))[field])
    assert f'"{reason}"' in json.dumps(rows)


USER = [{"role": "user", "content": "hi"}]


def called(arguments):
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(
    "path, body, named",
    [
        (CHAT, [], "body: expected an object"),
        (CHAT, {}, "messages: expected at least one"),
        (CHAT, {"messages": "hi"}, "messages: expected a list, got str"),
        (CHAT, {"messages": [1]}, r"messages\[0\]: expected an object"),
        (CHAT, {"messages": [{"content": "x"}]}, r"messages\[0\].role: expected a text, got nothing"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role: .*'robot'"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content: expected a list"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"content\[0\].type: .*'image_url'; .* text only"),
        (CHAT, {"messages": [*USER, {"role": "assistant", "content": "x"}]}, "the last message is the assistant's"),
        (CHAT, {"messages": [called("{")]}, "arguments: expected the JSON of an object"),
        (CHAT, {"messages": [called("[" * 5000)]}, r"messages\[0\].tool_calls\[0\].function.arguments"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, r"tool_calls\[0\].function: expected an object"),
        (CHAT, {"messages": USER, "n": 2}, "n: 2 is not supported"),
        (CHAT, {"messages": USER, "stop": ["x", 1]}, r"stop\[1\]: expected a text"),
        (CHAT, {"messages": USER, "stop": ["x"] * 17}, "stop: expected at most 16"),
        (CHAT, {"messages": USER, "logprobs": True}, "logprobs: "),
        (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens: expected at least 1"),
        (CHAT, {"messages": USER, "max_tokens": True}, "max_tokens: expected an integer, got bool"),
        (CHAT, {"messages": USER, "stream": "yes"}, "stream: expected true or false"),
        (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice: "),
        (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, r"tools\[0\].function: expected an object"),
        (CHAT, {"messages": USER, "response_format": {"type": "json_object"}}, "response_format: "),
        (CHAT, {"messages": USER, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        (CHAT, {"messages": USER * 5000}, "messages: expected at most 4096 entries, got 5000"),
        (MESSAGES, {"messages": USER}, "max_tokens: expected an integer, got nothing"),
        (MESSAGES, {"messages": [{"role": "system", "content": "x"}], "max_tokens": 1}, r"messages\[0\].role"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1}, r"messages\[0\].content\[0\].type"),
        (MESSAGES, {"messages": USER, "max_tokens": 1, "tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\[0\].type"),
        (MESSAGES, {"messages": USER, "max_tokens": 1, "stop_sequences": 5}, "stop_sequences"),
        (MESSAGES, {"messages": USER, "max_tokens": 1, "tool_choice": {"type": "any"}}, "tool_choice"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\].type"),
        (RESPONSES, {"input": []}, "input: expected at least one message"),
        (RESPONSES, {"input": "hi", "text": {"format": {"type": "json_schema"}}}, "text.format"),
        (RESPONSES, {"input": "hi", "tools": [{"type": "web_search"}]}, r"tools\[0\].type"),
        ("/v1/nowhere", {}, "/v1/nowhere: no such path"),
    ],
)
def test_request_that_cannot_be_answered_is_refused_in_one_line_with_its_field(path, body, named):
    with pytest.raises(BadRequest, match=named) as caught:
        parse_request(path, body)
    assert "\n" not in str(caught.value) and caught.value.status == (404 if "nowhere" in path else 400)


def test_deep_nesting_and_lone_surrogates_are_no_crash():
    deep = []
    for _ in range(500):
        deep = [deep]
    with pytest.raises(BadRequest, match="nested levels"):
        parse_request(CHAT, {"messages": deep})
    request = parse_request(CHAT, {"messages": [{"role": "user", "content": "a\ud800b"}]})
    assert request.messages[0]["content"] == "a\ufffdb"


NAMES = "role content type text tool_calls function name arguments input id system tools output call_id".split()
VALUES = st.sampled_from(["user", "assistant", "tool", "text", "function", "{}"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from(sorted(PATHS)), st.sampled_from(["messages", "input", "tools", "system"]), JSON, st.lists(JSON, max_size=3))
def test_broken_requests_are_parsed_or_refused(path, field, value, entries):
    for given_value in (value, entries):
        body = {"messages": USER, "input": "hi", "max_tokens": 5, field: given_value}
        try:
            request = parse_request(path, body)
        except BadRequest as error:
            assert str(error)
        else:
            assert request.messages and len(request.echoes) == len(request.messages)
            assert all(isinstance(message["content"], str) for message in request.messages)


def test_count_of_tokens_needs_no_limit_for_the_answer():
    assert parse_request("/v1/messages/count_tokens", {"messages": USER, "model": "m"}).max_tokens == 0


def test_fields_that_the_recipe_decides_are_ignored_and_named():
    request = parse_request(CHAT, {"messages": USER, "temperature": 0, "seed": 1, "top_p": None, "user": "me"})
    assert request.ignored == ("temperature", "seed")


def test_tool_results_and_text_of_one_user_message_keep_their_order():
    blocks = [
        {"type": "tool_result", "tool_use_id": "k1", "content": "r"},
        {"type": "text", "text": "and"},
        {"type": "text", "text": "now"},
    ]
    request = parse_request(MESSAGES, {"max_tokens": 5, "messages": [{"role": "user", "content": blocks}]})
    assert request.messages == ({"role": "tool", "tool_call_id": "k1", "content": "r"}, {"role": "user", "content": "and\nnow"})


@pytest.mark.parametrize("protocol", Protocol)
def test_errors_have_the_form_that_clients_raise(protocol):
    body = error_body(protocol, 401, "no such key")
    assert body["error"]["message"] == "no such key" and body["error"]["type"] == "authentication_error"
    assert ("type" in body) == (protocol is Protocol.MESSAGES)
    first = next(error_events(protocol, 500, "lost")).decode()
    data = json.loads(first.partition("data: ")[2])
    assert data["error"]["message"] == "lost"
    assert first.startswith("event: error\n") == (protocol is not Protocol.CHAT)
