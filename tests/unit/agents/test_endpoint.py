"""The endpoint before a program: keys, retries, waits, clients that leave or send nonsense; windows are played by fake_run.py."""

import asyncio
import contextlib
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from megatron_rl.agents.chat_template import ChatTemplate
from megatron_rl.agents.conversation import Conversation
from megatron_rl.agents.endpoint import MAX_BODY_BYTES, Endpoint
from megatron_rl.agents.episodes import Episode, EpisodeLimits
from megatron_rl.agents.turn_text import Parsers, parse_turn
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Score
from megatron_rl.environments.base import Ended, Environment
from tests.chat_models import END_ID
from tests.unit.agents.fake_run import FakeRun

LIMITS = EpisodeLimits(max_prompt_tokens=2000, max_response_tokens=2000, max_rows=4)
HI = [{"role": "user", "content": "hi"}]


class Bare(Environment):
    """An environment with episodes that a test ends itself."""

    opens = True

    def __init__(self, endpoint: Endpoint, template: ChatTemplate, limits: EpisodeLimits) -> None:
        self.endpoint, self.template, self.limits = endpoint, template, limits
        self.episodes: dict[str, Episode] = {}
        self.branches: asyncio.Queue = asyncio.Queue()
        self.unwanted: set[str] = set()

    def add(self, name: str) -> str:
        conversation = Conversation(self.template)
        self.episodes[name] = Episode(name, conversation, self.limits, self.read_turn, self.branches, self.unwanted)
        return self.endpoint.add(self.episodes[name])

    async def read_turn(self, turn, request, answer_id, num_prompt_tokens):
        stopped = turn.finish_reason == "stop"
        options = dict(answer_id=answer_id, stopped=stopped, num_prompt_tokens=num_prompt_tokens)
        return await parse_turn(self.template, request, turn.token_ids, Parsers(), **options)

    async def respond(self, prompt, turns, episode):
        owner, row = next((one, row) for one in self.episodes.values() if (row := one.row(episode)) is not None)
        return await owner.next_message(row, turns)

    def graded_text(self, prompt, turns, index): ...

    def turn_reward(self, prompt, turns, index, grades): ...

    def outcome(self, prompt, turns, grades): ...


@asynccontextmanager
async def served(
    tokenizer: Tokenizer, *, limits=LIMITS, names: tuple[str, ...] = ("train-0",), hold_back_s=0.3, return_s=20.0, **options: Any
):
    """An endpoint with running episodes, and a session of its client."""
    template = ChatTemplate(tokenizer)
    endpoint = Endpoint(template=template, **options)
    endpoint.hold_back_s, endpoint.keep_alive_s, endpoint.return_s = hold_back_s, 0.1, return_s
    await endpoint.start()
    bare = Bare(endpoint, template, limits)
    run = FakeRun(bare, tokenizer, END_ID)
    keys = {name: bare.add(name) for name in names}
    tasks = [asyncio.create_task(run.episode(name)) for name in names] + [asyncio.create_task(run.open_branches())]
    for task in tasks:
        task.add_done_callback(lambda task: task.cancelled() or not task.exception() or main.cancel())
    main = asyncio.current_task()
    async with aiohttp.ClientSession(base_url=endpoint.url) as session:
        parts = dict(endpoint=endpoint, run=run, session=session, episodes=bare.episodes, tasks=tasks)
        yield SimpleNamespace(key=keys[names[0]], keys=keys, **parts)
    for task in tasks:
        if not task.cancel() and not task.cancelled():
            task.result()
    await endpoint.close()


CHAT = "/v1/chat/completions"


async def post(served: Any, messages: Any = HI, *, path: str = CHAT, key: str | None = None, headers: Any = None, **fields: Any):
    """Status and parsed body of the reply."""
    body = {"model": "m", "messages": messages, **fields}
    return await post_raw(served, json.dumps(body).encode(), path=path, key=key, headers=headers)


async def post_raw(served: Any, body: bytes, *, path: str = CHAT, key: str | None = None, headers: Any = None):
    sent = {"Authorization": f"Bearer {served.key if key is None else key}", "Content-Type": "application/json", **(headers or {})}
    async with served.session.post(path, data=body, headers=sent) as reply:
        text = await reply.text()
        return reply.status, json.loads(text) if text.strip().startswith("{") else text


def said(reply: Any) -> str:
    assert reply[0] == 200, reply
    return reply[1]["choices"][0]["message"]["content"]


def run(main: Any) -> Any:
    return asyncio.run(asyncio.wait_for(main, 25))


def test_a_conversation_grows_one_row_whose_sampled_tokens_stay(tokenizer):
    async def main():
        async with served(tokenizer) as s:
            history = list(HI)
            for turn in range(4):
                answer = said(await post(s, history))
                assert answer == f"answer {turn}"
                history += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"more {turn}"}]
            s.episodes["train-0"].end(Ended(Score(1.0)))
            assert (await s.tasks[0]).score.value == 1.0
            row = s.run.rows["train-0"]
            assert [tokenizer.decode(row.ids[a : a + n]) for a, n in row.spans] == [f"answer {turn}" for turn in range(4)]
            whole = tokenizer.raw_text(tokenizer.encode_prompt(history[:8], chat=True))
            assert tokenizer.raw_text(row.ids) == whole.removesuffix("\n<|im_start|>assistant\n")
            assert len(s.run.rows) == 1

    run(main())


def test_usage_counts_the_tokens_of_the_row(tokenizer):
    async def main():
        async with served(tokenizer) as s:
            _, body = await post(s)
            prompt = tokenizer.encode_prompt(HI, chat=True)
            assert body["usage"]["prompt_tokens"] == len(prompt) and body["usage"]["completion_tokens"] == len("answer 0") + 1
            count = await post(s, path="/v1/messages/count_tokens")
            assert count == (200, {"input_tokens": len(prompt)})

    run(main())


@pytest.mark.parametrize(("header", "scheme"), [("Authorization", "Bearer "), ("Authorization", "bearer "), ("x-api-key", "")])
def test_a_key_opens_its_own_episode_and_no_other(tokenizer, header, scheme):
    async def main():
        async with served(tokenizer, names=("train-0", "train-1")) as s:
            for name, key in s.keys.items():
                body = {"model": "m", "messages": [{"role": "user", "content": name}]}
                async with s.session.post(CHAT, json=body, headers={header: scheme + key}) as reply:
                    assert reply.status == 200
            for name in s.keys:
                assert name in tokenizer.decode(s.run.rows[name].ids)
            other = s.keys["train-1"].replace("train-1", "train-0")
            for key in ("", "x", other, f"{s.key}x", s.key[:-1], "train-0.", ".", "\u00e9"):
                assert (await post(s, key=key))[0] == 401
            async with s.session.get("/v1/models") as reply:
                assert reply.status == 401
            for headers in ({"x-api-key": s.key}, {"Authorization": "Bearer ", "x-api-key": s.key}):
                async with s.session.get("/v1/models", headers=headers) as reply:
                    assert [model["id"] for model in (await reply.json())["data"]] == ["policy"]

    run(main())


def test_a_shared_key_names_the_episode_in_a_header(tokenizer):
    async def main():
        async with served(tokenizer, names=("train-0", "train-1"), shared_key="all") as s:
            assert (await post(s, key="all", headers={"X-Session-ID": "train-1"}))[0] == 200
            assert len(s.run.rows["train-1"].spans) == 1 and not s.run.rows["train-0"].spans
            assert (await post(s, key="all"))[0] == 401
            assert (await post(s, key="all", headers={"X-Session-ID": "train-7"}))[0] == 401

    run(main())


def test_a_request_after_the_end_is_refused(tokenizer):
    async def main():
        async with served(tokenizer) as s:
            assert (await post(s))[0] == 200
            s.episodes["train-0"].end(Ended(Score(1.0)))
            for _ in range(2):
                status, body = await post(s)
                assert status == 410 and "has ended" in body["error"]["message"]
                s.endpoint.remove("train-0")

    run(main())


DEEP = b'{"a":' * 5000 + b"1" + b"}" * 5000
NONSENSE = [b"", b"{", b"[]", b"null", b"\xff", b'{"messages": 3}', b"[" * 100_000, b'{"model": "m", "messages": []}', DEEP]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/messages/count_tokens"])
def test_nonsense_is_refused_with_a_reason_and_the_episode_goes_on(tokenizer, path):
    async def main():
        async with served(tokenizer) as s:
            for body in NONSENSE:
                status, reply = await post_raw(s, body, path=path)
                assert status == 400 and reply["error"]["message"], body[:20]
            assert (await post(s, [{"role": "user", "content": "x", "tool_calls": []}] * 5000))[0] == 400
            status, reply = await post_raw(s, b" " * (MAX_BODY_BYTES + 1), path=path)
            assert status == 413 and str(MAX_BODY_BYTES) in reply["error"]["message"]
            assert said(await post(s)) == "answer 0"

    run(main())


def test_a_body_of_100_mb_is_refused_without_being_read_and_the_episode_goes_on(tokenizer):
    async def main():
        async with served(tokenizer) as s:
            sent = 0

            async def endless():
                nonlocal sent
                while sent < 100 << 20:
                    sent += 1 << 20
                    yield b" " * (1 << 20)

            with contextlib.suppress(aiohttp.ClientError):  # the connection may break before the reply is read
                async with s.session.post(CHAT, data=endless(), headers={"x-api-key": s.key}) as reply:
                    assert reply.status == 413
            assert sent < 64 << 20
            assert said(await post(s)) == "answer 0"

    run(main())


def test_other_paths_and_methods_are_refused(tokenizer):
    async def main():
        async with served(tokenizer) as s:
            assert (await post(s, path="/v1/embeddings"))[0] == 404
            assert (await post(s, path="/"))[0] == 404
            async with s.session.get("/v1/chat/completions", headers={"x-api-key": s.key}) as reply:
                assert reply.status == 405

    run(main())


def slow(seconds: float):
    async def answer(text: str, turns: int) -> str:
        await asyncio.sleep(seconds)
        return f"late {turns}"

    return answer


async def wait_for(condition: Any) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not come true")


def test_a_retry_joins_the_answer_that_is_sampled_and_counts_once(tokenizer):
    async def main():
        async with served(tokenizer) as s:
            s.run.answer = slow(1.0)
            first = asyncio.create_task(post(s, headers={"x-stainless-retry-count": "0"}))
            await asyncio.sleep(0.3)
            second = asyncio.create_task(post(s, headers={"x-stainless-retry-count": "1"}))
            await asyncio.sleep(0.1)
            first.cancel()  # as after a timeout
            assert said(await second) == "late 0"
            assert said(await post(s, headers={"x-stainless-retry-count": "2"})) == "late 0"  # the answer was lost on the way
            assert len(s.run.rows) == 1 and len(s.run.rows["train-0"].spans) == 1 and s.episodes["train-0"].num_joined == 2

    run(main())


def test_the_same_request_that_is_no_retry_is_another_sample(tokenizer):
    async def main():
        async with served(tokenizer) as s:
            s.run.answer = slow(0.4)
            replies = await asyncio.gather(*(post(s, headers={"x-stainless-retry-count": "0"}) for _ in range(2)), post(s))
            assert [said(reply) for reply in replies] == ["late 0"] * 3
            assert len(s.run.rows) == 3

    run(main())


def test_a_client_without_a_counter_gets_its_lost_answer_when_it_asks_again(tokenizer):
    async def main():
        async with served(tokenizer) as s:
            s.run.answer = slow(0.6)
            first = asyncio.create_task(post(s))
            await asyncio.sleep(0.2)
            first.cancel()
            await asyncio.sleep(0.1)
            assert said(await post(s)) == "late 0" and len(s.run.rows["train-0"].spans) == 1
            assert said(await post(s)) == "late 0" and len(s.run.rows) == 2  # delivered before: another sample

    run(main())


def test_a_client_that_left_goes_on_later_with_other_requests(tokenizer):
    async def main():
        async with served(tokenizer) as s:
            s.run.answer = slow(0.4)
            first = asyncio.create_task(post(s))
            await asyncio.sleep(0.2)
            first.cancel()
            assert said(await post(s, [{"role": "user", "content": "other"}])) == "late 0"
            await wait_for(lambda: s.run.rows["train-0"].spans)
            assert len(s.run.rows) == 2  # what was sampled for the client that left stays

    run(main())


@pytest.mark.parametrize(("stream", "filler"), [(False, b" "), (True, b": wait\n\n")])
def test_bytes_keep_a_waiting_connection_alive(tokenizer, stream, filler):
    async def main():
        async with served(tokenizer) as s:
            s.run.answer = slow(1.0)
            body = {"model": "m", "messages": HI, "stream": stream}
            async with s.session.post("/v1/chat/completions", json=body, headers={"x-api-key": s.key}) as reply:
                assert reply.status == 200
                text = await reply.read()
                assert text.startswith(filler * 3) and b"late 0" in text

    run(main())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_an_error_after_the_status_is_in_the_body_and_the_retry_gets_its_status(tokenizer, stream, path):
    async def main():
        async with served(tokenizer) as s:
            s.run.answer = slow(60)
            body = {"model": "m", "messages": HI, "stream": stream, "max_tokens": 9}
            async with s.session.post(path, json=body, headers={"x-api-key": s.key}) as reply:
                assert reply.status == 200
                s.episodes["train-0"].end(Ended(Score(None, error="killed")))
                text = b""
                with pytest.raises(aiohttp.ClientPayloadError):
                    while True:
                        text += await reply.content.readany()
                assert b"has ended" in text and (not stream or b"data: " in text)
            assert (await post(s, path=path, max_tokens=9, headers={"x-stainless-retry-count": "1"}))[0] == 410

    run(main())


def test_an_early_error_has_its_status(tokenizer):
    async def main():
        async with served(tokenizer, hold_back_s=5) as s:
            s.run.answer = slow(60)
            asked = asyncio.create_task(post(s))
            await asyncio.sleep(0.2)
            s.episodes["train-0"].end(Ended(Score(None, error="killed")))
            assert (await asked)[0] == 410

    run(main())


def test_a_history_beyond_the_budget_is_refused_as_a_context_window(tokenizer):
    async def main():
        async with served(tokenizer, limits=EpisodeLimits(100, 100, 4)) as s:
            status, body = await post(s, [{"role": "user", "content": "x" * 200}])
            assert status == 400 and "maximum context length is 100 tokens" in body["error"]["message"]
            history = [*HI, {"role": "assistant", "content": said(await post(s))}]
            status, body = await post(s, [*history, {"role": "user", "content": "x" * 100}])
            assert status == 400 and "maximum context length" in body["error"]["message"]
            assert said(await post(s, [*history, {"role": "user", "content": "x"}])) == "answer 1" and len(s.run.rows) == 1

    run(main())


def test_a_row_whose_budget_is_used_up_refuses_its_request(tokenizer):
    async def main():
        async with served(tokenizer, hold_back_s=5) as s:
            s.run.answer = slow(60)
            asked = asyncio.create_task(post(s))
            await asyncio.sleep(0.2)
            episode = s.episodes["train-0"]
            episode.close_row(episode.row("train-0"))
            status, body = await asked
            assert status == 400 and "maximum context length" in body["error"]["message"]

    run(main())


def test_histories_of_an_episode_are_rows_up_to_a_limit(tokenizer):
    async def main():
        async with served(tokenizer) as s:
            for number in range(LIMITS.max_rows):
                assert said(await post(s, [{"role": "user", "content": f"start {number}"}])) == "answer 0"
            status, body = await post(s, [{"role": "user", "content": "one more"}])
            assert status == 400 and "max_rows" in body["error"]["message"]
            assert len(s.run.rows) == LIMITS.max_rows
            s.episodes["train-0"].end(Ended(Score(0.5)))
            await wait_for(lambda: all(row.ended for row in s.run.rows.values()))
            assert {row.ended.score.value for row in s.run.rows.values()} == {0.5}

    run(main())


def test_a_turn_cut_by_length_says_so(tokenizer):
    async def main():
        async with served(tokenizer) as s:
            s.run.answer = lambda text, turns: ("cut", "length")
            _, body = await post(s)
            assert body["choices"][0]["finish_reason"] == "length"
            _, body = await post(s, [{"role": "user", "content": "b"}], path="/v1/messages", max_tokens=5)
            assert body["stop_reason"] == "max_tokens"

    run(main())


@pytest.mark.parametrize(
    ("path", "field"),
    [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), ("/v1/messages", "max_tokens"), ("/v1/responses", "max_output_tokens")],
)
def test_a_requests_own_limit_cuts_its_answer_alone_and_the_row_goes_on(tokenizer, path, field):
    async def main():
        async with served(tokenizer) as s:
            name = "input" if path == "/v1/responses" else "messages"
            history = HI
            for _ in range(2):
                _, body = await post_raw(s, json.dumps({"model": "m", name: history, field: 3}).encode(), path=path)
                if path == CHAT:
                    text, end = body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]
                elif path == "/v1/messages":
                    text, end = body["content"][0]["text"], body["stop_reason"]
                else:
                    text, end = body["output"][0]["content"][0]["text"], body["incomplete_details"]["reason"]
                assert text == "ans" and end == {CHAT: "length", "/v1/messages": "max_tokens"}.get(path, "max_output_tokens")
                history = [*HI, {"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
            assert [n for _, n in s.run.rows["train-0"].spans] == [3, 3] and len(s.run.rows) == 1

    run(main())


def test_a_stop_string_ends_an_answer_that_does_not_show_it_and_its_tokens_stay_in_the_row(tokenizer):
    async def main():
        async with served(tokenizer) as s:
            s.run.answer = lambda text, turns: "one</a> two STOP three"
            _, body = await post(s, stop=["STOP", "</a>", ""])
            choice = body["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("one", "stop")
            history = [*HI, choice["message"], {"role": "user", "content": "more"}]
            _, body = await post(s, history, stop="STOP")
            assert body["choices"][0]["message"]["content"] == "one</a> two "
            history = [*history, body["choices"][0]["message"], {"role": "user", "content": "b"}]
            _, body = await post(s, history, path="/v1/messages", max_tokens=99, stop_sequences=["</a>"])
            assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "</a>") and len(s.run.rows) == 1
            row = s.run.rows["train-0"]
            texts = [tokenizer.decode(row.ids[a : a + n]) for a, n in row.spans]
            assert texts == ["one</a>", "one</a> two STOP", "one</a>"]
            assert "one</a><|im_end|>\n<|im_start|>user\nmore<|im_end|>" in tokenizer.raw_text(row.ids)  # closed once, as context
            status, body = await post(s, stop=["x"] * 17)
            assert status == 400 and "stop" in body["error"]["message"]

    run(main())


def test_previous_response_id_stands_for_the_whole_history(tokenizer):
    async def main():
        async with served(tokenizer, names=("train-0", "train-1")) as s:
            _, first = await post_raw(s, json.dumps({"model": "m", "input": "hi"}).encode(), path="/v1/responses")
            name = first["id"]
            for turn in range(1, 3):
                asked = {"model": "m", "input": [{"role": "user", "content": f"more {turn}"}], "previous_response_id": name}
                status, body = await post_raw(s, json.dumps(asked).encode(), path="/v1/responses")
                assert status == 200 and body["output"][0]["content"][0]["text"] == f"answer {turn}"
                name = body["id"]
            assert len(s.run.rows["train-0"].spans) == 3 and len(s.run.rows) == 2
            status, body = await post_raw(s, json.dumps(asked).encode(), path="/v1/responses", key=s.keys["train-1"])
            assert status == 400 and "previous_response_id" in body["error"]["message"]

    run(main())


def test_a_client_that_left_for_good_ends_its_turn_and_its_row_is_unscored(tokenizer):
    async def main():
        async with served(tokenizer, return_s=0.2) as s:
            s.run.answer = slow(60)
            for text in ("first", "second"):
                asked = asyncio.create_task(post(s, [{"role": "user", "content": text}]))
                await asyncio.sleep(0.2)
                asked.cancel()
            await wait_for(lambda: all(row.spans for row in s.run.rows.values()))
            assert len(s.run.rows) == 2 and not s.run.environment.unwanted
            s.run.answer = lambda text, turns: "fine"
            history = [{"role": "user", "content": "second"}]
            status, body = await post(s, history)  # comes back late: what was sampled is its answer
            assert status == 200 and body["choices"][0]["message"]["content"] == "x" and body["choices"][0]["finish_reason"] == "length"
            assert said(await post(s, [*history, body["choices"][0]["message"], *HI])) == "fine"
            s.episodes["train-0"].end(Ended(Score(1.0)))
            await wait_for(lambda: all(row.ended for row in s.run.rows.values()))
            scores = [row.ended.score for row in s.run.rows.values()]
            assert scores[0].value is None and "left" in scores[0].error and scores[1].value == 1.0
            assert s.episodes["train-0"].num_lost == 1

    run(main())


def test_a_client_that_comes_back_in_time_keeps_its_turn(tokenizer):
    async def main():
        async with served(tokenizer, return_s=0.6) as s:
            s.run.answer = slow(1.2)
            first = asyncio.create_task(post(s, headers={"x-stainless-retry-count": "0"}))
            await asyncio.sleep(0.2)
            first.cancel()
            await asyncio.sleep(0.2)
            assert said(await post(s, headers={"x-stainless-retry-count": "1"})) == "late 0"
            assert len(s.run.rows) == 1 and s.episodes["train-0"].num_lost == 0

    run(main())


def test_a_client_that_sends_its_body_too_slowly_is_refused(tokenizer):
    async def main():
        async with served(tokenizer) as s:
            s.endpoint.read_s = 0.2

            async def dripping():
                for _ in range(8):
                    yield b" "
                    await asyncio.sleep(0.1)

            async with s.session.post(CHAT, data=dripping(), headers={"x-api-key": s.key}) as reply:
                assert reply.status == 408 and "did not arrive" in await reply.text()
            assert said(await post(s)) == "answer 0"

    run(main())


def test_ten_thousand_calls_in_a_message_are_refused_with_their_place(tokenizer):
    async def main():
        async with served(tokenizer) as s:
            calls = [{"id": str(i), "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in range(10_000)]
            status, body = await post(s, [*HI, {"role": "assistant", "content": "", "tool_calls": calls}, *HI])
            assert status == 400 and "messages[1].tool_calls: expected at most 4096" in body["error"]["message"]
            assert said(await post(s)) == "answer 0"

    run(main())


def test_thousands_of_programs_may_wait_at_a_time(tokenizer):
    number = 500

    async def main():
        names = tuple(f"train-{i}" for i in range(number))
        async with served(tokenizer, names=names, hold_back_s=0.2) as s:
            s.run.answer = slow(1.0)
            replies = await asyncio.gather(*(post(s, key=key) for key in s.keys.values()))
            assert [said(reply) for reply in replies] == ["late 0"] * number
            lags = []

            async def measure():
                while True:
                    start = asyncio.get_running_loop().time()
                    await asyncio.sleep(0.005)
                    lags.append(asyncio.get_running_loop().time() - start - 0.005)

            measuring = asyncio.create_task(measure())
            await asyncio.sleep(0.5)
            measuring.cancel()
            assert sorted(lags)[len(lags) * 9 // 10] < 0.1

    run(main())
