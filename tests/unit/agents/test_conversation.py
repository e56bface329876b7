"""Laws of conversations: which row a request continues, with which tokens, and why another one is a fork."""

import re
from collections import Counter

import pytest

from megatron_rl.agents.conversation import Fork
from megatron_rl.agents.endpoint import parse_request
from tests.unit.agents.chat_styles import STYLES
from tests.unit.agents.clients import CLIENTS, MINI_SWE_AGENT
from tests.unit.agents.played import NOISE, Played, played

OPENAI, AGENTS, ANTHROPIC = CLIENTS[0], CLIENTS[2], CLIENTS[5]
NUM_SEEDS = 6
"""Conversations per style and client; 24 make a thousand."""


@pytest.fixture(params=STYLES.values(), ids=STYLES)
def style(request):
    return request.param


def bare(text):
    """Text without thoughts and with harmony's two ends as one: what a row and the template's own rendering have in common."""
    text = text.replace("<|return|>", "<|end|>")
    text = re.sub(r"<think>[^<]*</think>(\n\n(?!\n))?", "", text).replace("<｜Assistant｜>\n\n", "<｜Assistant｜>")
    return re.sub(r"(<\|start\|>assistant)<\|channel\|>analysis<\|message\|>[^<]*<\|end\|><\|start\|>assistant", r"\1", text)


def linear(style, client, seed) -> Played:
    one = played(style, client, NOISE, seed)
    return one.turns("".join(one.random.choices("ct", k=7)))


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_linear_conversation_is_one_row_that_keeps_all_sampled_tokens(style, client):
    for seed in range(NUM_SEEDS):
        one = linear(style, client, seed)
        assert (len(one.rows), one.lost(), sum(one.conversation.forks.values())) == (1, 0, 0)
        sampled = [id for _, _, ids in one.spans for id in ids]
        added = [id for place in one.places for id in place.token_ids]
        assert Counter(one.rows[0]) == Counter(sampled) + Counter(added)
        assert one.conversation.num_tokens(0) == len(one.rows[0])


@pytest.mark.parametrize("noise", [(), ("thoughts",), ("thoughts", "recut"), ("thoughts", "recut", "end")], ids="+".join)
def test_row_reads_as_the_templates_own_rendering(style, noise):
    for client in CLIENTS:
        one = played(style, client, frozenset(noise), 0)
        for _ in range(5):
            one.turns(one.random.choice("ct"))
            assert bare(one.row_text()) == bare(one.whole())


def test_answer_that_the_client_leaves_out_is_a_fork_from_the_answer_before(style):
    one = played(style, MINI_SWE_AGENT, frozenset({"thoughts"}), 0).turns("ctc")
    assert [(place.row, place.parent, place.fork) for place in one.places] == [(0, -1, ""), (0, -1, ""), (1, 0, "omitted_answer")]
    end = one.spans[0][1] + len(one.spans[0][2])
    assert one.rows[1][:end] == one.rows[0][:end]
    assert (one.lost(), one.conversation.forks[Fork.OMITTED_ANSWER]) == (0, 1)


def test_first_answer_left_out_is_a_fork_with_its_reason(style):
    one = played(style, MINI_SWE_AGENT, frozenset(), 0).turns("tc")
    assert [place.fork for place in one.places] == ["", "omitted_answer"]


def test_second_request_while_a_row_waits_is_parallel(style):
    one = played(style, OPENAI, frozenset({"thoughts"}), 0).turns("c")
    request = one.request()
    first, second = one.conversation.place(request), one.conversation.place(request)
    assert (first.fork, first.is_new, second.fork, second.is_new, second.parent) == ("", False, "parallel", True, 0)
    assert list(second.token_ids) == one.rows[0] + list(first.token_ids)
    one.answer(second, request, with_calls=False)
    one.events.pop()
    one.answer(first, request, with_calls=True)
    one.react(one.events[-1][1])
    assert one.conversation.place(one.request()).row == 0


def test_same_request_after_its_answer_is_sampled_again_on_a_new_row(style):
    one = played(style, OPENAI, frozenset(), 0).turns("c")
    for fork in ("", "resampled"):
        one.ask(with_calls=False)
        one.events.pop()
        assert one.places[-1].fork == fork


def test_edited_answer_is_a_fork_and_an_edited_first_message_a_new_history():
    one = played(STYLES["qwen2.5"], OPENAI, frozenset(), 0).turns("ct")
    one.events[-2][1]["choices"][0]["message"]["content"] = "something else"
    assert one.conversation.place(one.request()).fork == "edited_history"
    one.events[1] = ("user", "another question")
    place = one.conversation.place(one.request())
    assert (place.fork, place.parent, place.row) == ("new_history", -1, 2)


def test_request_with_other_tools_is_a_fork_with_its_reason():
    one = played(STYLES["qwen2.5"], OPENAI, frozenset(), 0).turns("c")
    body = OPENAI.body(one.events)
    place = one.conversation.place(parse_request(OPENAI.path, {**body, "tools": body["tools"][:1]}))
    assert (place.fork, place.is_new) == ("changed_tools", True)


@pytest.mark.parametrize("client", [OPENAI, AGENTS], ids=lambda client: client.name)
def test_following_the_template_makes_a_row_per_user_message_and_none_in_a_tool_cycle(client):
    one = played(STYLES["qwen3"], client, frozenset({"thoughts"}), 0, thoughts="template").turns("cctcct")
    assert [place.fork for place in one.places] == ["", "", "", "dropped_thoughts", "", ""]
    assert one.lost() == 0
    text = one.style.tokenizer.raw_text(one.places[3].token_ids)
    assert text == one.style.tokenizer.render_chat(one.requests[3].messages, one.requests[3].tools, generate=True)


def test_without_thoughts_to_drop_following_the_template_makes_no_row(style):
    one = played(style, OPENAI, frozenset({"recut"}), 0, thoughts="template")
    one.turns("cctcct")
    assert len(one.rows) == 1


def test_equal_answers_are_told_apart_by_the_ids_that_the_client_sends_back():
    one = played(STYLES["glm4"], ANTHROPIC, frozenset(), 0).turns("c")
    request = one.request()
    places = [one.conversation.place(request), one.conversation.place(request)]
    state = one.random.getstate()
    bodies = []
    for place in places:
        one.random.setstate(state)
        bodies.append(one.answer(place, request, with_calls=True))
        one.events.pop()
    for place, body in zip(places, bodies):
        one.events.append(("answer", body))
        one.react(body)
        found = one.conversation.place(one.request())
        assert (found.row, found.is_new) == (place.row, False)
        del one.events[-2:]


def test_text_beside_calls_may_be_left_out_by_the_client():
    one = played(STYLES["qwen2.5"], OPENAI, frozenset(), 3)
    body = one.ask(with_calls=True)
    while not body["choices"][0]["message"]["content"]:
        one.events[:] = [*one.events[:1], ("user", one.words(9))]
        body = one.ask(with_calls=True)
    row = one.places[-1].row
    body["choices"][0]["message"]["content"] = None
    one.react(body)
    place = one.conversation.place(one.request())
    assert (place.row, place.is_new) == (row, False)


def test_withdrawn_place_leaves_no_trace():
    one = played(STYLES["qwen2.5"], OPENAI, frozenset(), 0)
    one.conversation.withdraw(one.conversation.place(one.request()))
    one.turns("c")
    place = one.conversation.place(one.request())
    one.conversation.withdraw(place)
    assert one.conversation.place(one.request()) == place
    fork = one.conversation.place(one.request())
    assert fork.fork == "parallel"
    one.conversation.withdraw(fork)
    assert one.conversation.forks.total() == 0


def test_answer_is_recorded_once():
    one = played(STYLES["qwen2.5"], OPENAI, frozenset(), 0).turns("c")
    with pytest.raises(ValueError, match="does not wait"):
        one.conversation.record(one.places[0], [1], one.answers[0])


def main() -> None:
    """Play many conversations of each style and client: python -m tests.unit.agents.test_conversation 24"""
    import sys

    for one in STYLES.values():
        rows, lost, turns = [], 0, 0
        for client in CLIENTS:
            for seed in range(int(sys.argv[1])):
                ended = linear(one, client, seed)
                rows.append(len(ended.rows))
                lost += ended.lost()
                turns += len(ended.places)
        each = sum(rows) / len(rows)
        print(f"{one.name}: {len(rows)} conversations, {turns} turns, {each:.3f} rows each, {lost} answers lost", flush=True)


if __name__ == "__main__":
    main()
