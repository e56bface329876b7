"""Log-probs from a teacher's server: each token's own, retried while the server fails, refused by name otherwise."""

import asyncio
import functools
import json

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from megatron_rl.errors import UserError
from megatron_rl.rollout import served_reference
from megatron_rl.rollout.served_reference import served_logprobs

SEQUENCES = [(np.array([5, 6, 7, 8]), 2), (np.array([9, 1]), 1)]


def scored(respond, monkeypatch, **options):
    monkeypatch.setattr(served_reference, "_PAUSE_S", 0.01)

    async def ask():
        application = web.Application()
        application.router.add_post("/generate", respond)
        async with TestServer(application, host="127.0.0.1") as server:
            return await served_logprobs(str(server.make_url("")).rstrip("/"), SEQUENCES, api_key="teacher's", **options)

    return asyncio.run(ask())


def reply_of(body, logprob=lambda token: -token / 8):
    """SGLang's reply: the entries from logprob_start_len on, of which the first has no log-prob if it is the first token."""
    start, ids = body["logprob_start_len"], body["input_ids"]
    entries = [[logprob(token) if start + index else None, token, None] for index, token in enumerate(ids[start:])]
    top = [[[-rank / 4, token + rank, None] for rank in range(body.get("top_logprobs_num", 0))] for token in ids[start:]]
    top[0] = top[0] if start else None
    return web.json_response({"meta_info": {"input_token_logprobs": entries, "input_top_logprobs": top}})


def test_each_sequence_gets_the_logprobs_of_its_tokens_from_first_on_after_a_failure_of_the_server(monkeypatch):
    failures = [web.Response(status=503)]

    async def respond(request):
        body = await request.json()
        assert request.headers["Authorization"] == "Bearer teacher's"
        assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0} and body["return_logprob"]
        return failures.pop() if failures else reply_of(body)

    found = scored(respond, monkeypatch)
    assert [one.logprobs.tolist() for one in found] == [[-7 / 8, -1.0], [-1 / 8]]


def test_the_most_likely_tokens_at_each_position_come_with_their_logprobs(monkeypatch):
    async def respond(request):
        return reply_of(await request.json())

    first, second = scored(respond, monkeypatch, top_k=2)
    assert first.top_ids.tolist() == [[7, 8], [8, 9]] and first.top_logprobs.tolist() == [[0.0, -0.25]] * 2
    assert second.top_ids.tolist() == [[1, 2]] and second.logprobs.tolist() == [-1 / 8]


def test_the_0_that_sglang_writes_for_the_vocabularys_last_token_is_taken_and_another_token_is_not(monkeypatch):
    async def respond(request, written=0):
        reply = json.loads(reply_of(await request.json()).text)
        for entry in reply["meta_info"]["input_token_logprobs"]:
            entry[1] = written if entry[1] == 8 else entry[1]
        return web.json_response(reply)

    assert scored(respond, monkeypatch)[0].logprobs.tolist() == [-7 / 8, -1.0]
    with pytest.raises(UserError, match="did not score"):
        scored(functools.partial(respond, written=3), monkeypatch)


def test_a_server_that_gives_fewer_tokens_than_asked_for_is_refused(monkeypatch):
    async def respond(request):
        return reply_of(await request.json() | {"top_logprobs_num": 1})

    with pytest.raises(UserError, match="expected a finite log-prob of each token and of 2 most likely"):
        scored(respond, monkeypatch, top_k=2)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (lambda body: web.Response(status=400, text="longer than the context"), "status 400: longer than the context"),
        (lambda body: web.Response(status=500), "status 500"),
        (lambda body: web.Response(text="<html>"), "expected a finite log-prob of each token, got <html>"),
        (lambda body: reply_of(body, lambda token: float("nan")), "expected a finite log-prob"),
        (lambda body: reply_of({**body, "input_ids": body["input_ids"][::-1]}), "expected a finite log-prob"),
    ],
)
def test_a_server_that_does_not_score_is_named_with_the_key_and_the_reason(reply, reason, monkeypatch):
    async def respond(request):
        return reply(await request.json())

    with pytest.raises(UserError, match=f"the server http://127.0.0.1:.*did not score .*{reason}"):
        scored(respond, monkeypatch)
