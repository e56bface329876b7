"""Laws of reply validation: a reply is either valid for its request or rejected, regardless of the damage."""

import asyncio
import base64
import copy
import json
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_rl.errors import UserError
from megatron_rl.rollout.requests import Generation, GenerationRequest, RetryableRequestError, RouteShape
from megatron_rl.rollout.sglang.wire.protocol import parse_generation
from megatron_rl.rollout.sglang.wire.response_validation import InvalidReply
from tests.unit.rollout.sglang.balance.test_client import VOCAB_SIZE, FakeServer, run_with

REQUEST = GenerationRequest("r", (3, 4, 5), 4, stop_token_ids=(9,), stop_strings=("##",), weight_version="7")
HOT = GenerationRequest("r", (3, 4, 5), 1, top_k=4, logprobs_after_top_k=True, weight_version="7")
SHAPE = RouteShape(num_layers=2, top_k=2, num_experts=4)
ROUTED = GenerationRequest("r", (3, 4, 5), 4, routes=SHAPE, weight_version="7")


def good_answer(request: GenerationRequest) -> dict[str, Any]:
    token_ids = [11, 12, 13][: request.max_new_tokens]
    routes = np.arange((len(request.input_ids) + len(token_ids) - 1) * 4, dtype=np.int32).reshape(-1, 2, 2) % 4
    meta = {
        "id": "r;",
        "finish_reason": {"type": "length", "length": len(token_ids)},
        "prompt_tokens": len(request.input_ids),
        "completion_tokens": len(token_ids),
        "cached_tokens": 2,
        "weight_version": "7",
        "output_token_logprobs": [[-0.5 - i, token, None] for i, token in enumerate(token_ids)],
        "output_token_sampling_logprobs": [-0.25] * len(token_ids),
        "routed_experts": base64.b64encode(routes.tobytes()).decode(),
    }
    if request.needs_spans:
        meta |= {"weight_version": "8", "weight_versions": spans(("7", 0, 1), ("8", 1, len(token_ids)))}
    return {"text": "", "output_ids": token_ids, "meta_info": meta}


def spans(*found: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in found]


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The path of every field and entry in an answer."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def changed(answer: dict[str, Any], path: tuple, change: str, junk: Any) -> Any:
    """``answer`` with one entry dropped, replaced, duplicated or truncated."""
    answer = copy.deepcopy(answer)
    holder = answer
    for key in path[:-1]:
        holder = holder[key]
    if change == "drop":
        del holder[path[-1]]
    elif change == "double" and isinstance(holder[path[-1]], (list, str)):
        holder[path[-1]] = holder[path[-1]] * 2
    elif change == "cut" and isinstance(holder[path[-1]], (list, str)):
        holder[path[-1]] = holder[path[-1]][:-1]
    else:
        holder[path[-1]] = junk
    return answer


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, VOCAB_SIZE, 2**31, 2**63, -(2**40), 1e308, -1e308, 0.5, 7.0, math.nan, math.inf, -math.inf]),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-2, 200), max_size=5),
    st.lists(st.lists(st.one_of(st.none(), st.floats(), st.integers()), max_size=4), max_size=5),
    st.dictionaries(st.sampled_from(["type", "matched", "status_code", "id", "x"]), st.one_of(st.none(), st.integers(), st.text())),
)
UPDATED = replace(REQUEST, newest_version="8", needs_spans=True)
REQUESTS = (REQUEST, HOT, ROUTED, UPDATED)


def assert_believable(request: GenerationRequest, generation: Generation) -> None:
    """Checks the properties that training needs of a sample, independently of the parser."""
    assert isinstance(generation, Generation)
    assert len(generation.token_ids) == len(generation.logprobs) <= request.max_new_tokens
    assert (generation.token_ids.dtype, generation.logprobs.dtype) == (np.int32, np.float32)
    for token, logprob in zip(generation.token_ids.tolist(), generation.logprobs.tolist(), strict=True):
        assert 0 <= token < VOCAB_SIZE
        assert math.isfinite(logprob) and logprob <= 1e-3
    assert generation.finish_reason == "abort" or (generation.finish_reason in ("stop", "length") and len(generation.token_ids))
    versions = {request.weight_version, request.newest_version} - {""}
    assert not len(generation.token_ids) or generation.weight_version in versions
    if generation.versions:
        sampled_by = [version for version, start, end in generation.versions for _ in range(start, end)]
        assert len(sampled_by) == len(generation.token_ids) and versions.issuperset(sampled_by)
    assert generation.stop_string in ("", *request.stop_strings)
    assert type(generation.cached_tokens) is int and generation.cached_tokens >= 0
    if request.routes is not None and len(generation.token_ids):
        assert generation.routes.shape == (len(request.input_ids) + len(generation.token_ids) - 1, 2, 2)
        assert generation.routes.min() >= 0 and generation.routes.max() <= SHAPE.num_experts


@settings(max_examples=300)
@given(
    st.sampled_from(REQUESTS),
    st.lists(
        st.tuples(st.integers(0, 10_000), st.sampled_from(["drop", "replace", "replace", "double", "cut"]), JUNK),
        min_size=1,
        max_size=3,
    ),
)
@example(REQUEST, [(0, "replace", None)])
def test_changed_reply_is_either_valid_or_rejected_with_a_message(request, changes):
    answer: Any = good_answer(request)
    assert_believable(request, parse_generation(request, answer, VOCAB_SIZE))
    for where, change, junk in changes:
        paths = places(answer)
        if paths:
            answer = changed(answer, paths[where % len(paths)], change, junk)
    try:
        generation = parse_generation(request, answer, VOCAB_SIZE)
    except (UserError, RetryableRequestError) as error:
        assert 10 < len(str(error)) < 1000
    else:
        assert_believable(request, generation)


@pytest.mark.parametrize(
    ("path", "junk", "names"),
    [
        (("output_ids",), [1_000_000, 12, 13], "output_ids: expected token ids of the vocabulary .0 to 99., got 1000000"),
        (("output_ids",), [-3, 12, 13], "got -3"),
        (("output_ids",), [True, 12, 13], "output_ids: expected whole numbers, got True"),
        (("output_ids",), [1] * 400, "at most the 4 requested tokens, got '400 tokens'"),
        (("output_ids",), [11, 12], "completion_tokens: expected 2"),
        (("output_ids",), None, "output_ids: expected a list, got None"),
        (("meta_info", "output_token_logprobs", 0, 0), 7.0, "log-probs of at most 0, got 7.0"),
        (("meta_info", "output_token_logprobs", 0, 0), None, "not finite"),
        (("meta_info", "output_token_logprobs", 0, 1), 12, "the log-prob of token 11, got 'the log-prob of token 12'"),
        (("meta_info", "output_token_logprobs", 0), [-0.5], "entries .log-prob, token id, text., got .-0.5."),
        (("meta_info", "prompt_tokens"), 2, "prompt_tokens: expected 3, got 2"),
        (("meta_info", "cached_tokens"), -1, "cached_tokens: expected a whole number from 0"),
        (("meta_info", "finish_reason", "type"), "done", "finish_reason.type: expected stop, length or abort, got 'done'"),
        (("meta_info", "finish_reason"), {"type": "stop", "matched": "NaN happened"}, "finish_reason.matched"),
        (("meta_info", "finish_reason"), {"type": "stop", "matched": 99}, "finish_reason: expected a stop at the last token 13"),
        (("meta_info", "finish_reason"), {"type": "stop"}, "finish_reason: expected a stop at the last token 13"),
        (("meta_info", "weight_version"), 7, "weight_version: expected a text, got 7"),
        (("meta_info", "weight_version"), "8", "version '8', but version 7 was published"),
        (("meta_info",), [], "meta_info: expected a JSON object, got .."),
    ],
)
def test_invalid_reply_error_names_the_field_and_the_value(path, junk, names):
    with pytest.raises(InvalidReply, match=names):
        parse_generation(REQUEST, changed(good_answer(REQUEST), path, "replace", junk), VOCAB_SIZE)


@pytest.mark.parametrize(
    ("found", "names"),
    [
        (None, "weight_versions: the server does not report which weights.*weight_update=between"),
        ("7", "weight_versions: expected a list, got '7'"),
        (spans(("7", 0, 2)), "spans up to the last of 3 tokens"),
        (spans(("7", 0, 2), ("8", 1, 3)), "a span of tokens that starts at 2"),
        (spans(("7", 0, 0), ("8", 0, 3)), "a span of tokens that starts at 0"),
        (spans(("7", 0, 4)), "weight_versions.end: expected a whole number from 0 to 3, got 4"),
        (spans(("6", 0, 1), ("7", 1, 3)), "version '6', but version 7 was published"),
        ([{"version": 7, "start": 0, "end": 3}], "weight_versions.version: expected a text, got 7"),
    ],
)
def test_weight_version_spans_must_cover_the_reply(found, names):
    with pytest.raises(InvalidReply, match=names):
        parse_generation(UPDATED, changed(good_answer(UPDATED), ("meta_info", "weight_versions"), "replace", found), VOCAB_SIZE)


def test_reply_without_spans_has_one_version_if_none_are_requested():
    assert parse_generation(REQUEST, good_answer(REQUEST), VOCAB_SIZE).spans == (("7", 0, 3),)
    assert parse_generation(UPDATED, good_answer(UPDATED), VOCAB_SIZE).spans == (("7", 0, 1), ("8", 1, 3))


def test_checking_a_reply_is_cheap_compared_to_parsing_it():
    num = 50_000
    request = GenerationRequest("r", (1,), num)
    meta = {"finish_reason": {"type": "length"}, "weight_version": "7"}
    meta["output_token_logprobs"] = [[-0.25, i % 100, None] for i in range(num)]
    content = orjson.dumps({"output_ids": [i % 100 for i in range(num)], "meta_info": meta})
    best = {"read": math.inf, "check": math.inf}
    for _ in range(5):
        began = time.process_time()
        answer = orjson.loads(content)
        middle = time.process_time()
        parse_generation(request, answer, 100)
        best["read"] = min(best["read"], middle - began)
        best["check"] = min(best["check"], time.process_time() - middle)
    assert best["check"] < 8 * best["read"], best  # slow Python per token would be 30 times as slow


BODIES = st.one_of(
    st.binary(max_size=40),
    st.just(b"<html><body>502 Bad Gateway</body></html>"),
    st.tuples(st.integers(0, 10_000), st.sampled_from(["drop", "replace", "double", "cut"]), JUNK),
    st.integers(1, 300).map(lambda cut: ("cut", cut)),
    st.sampled_from([b"[]", b"{}", b"null", b"[null]", b"[" * 100_000, b'[{"output_ids": NaN}]', b"\xff\xfe", b'"\\ud800"']),
)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.sampled_from([200, 200, 200, 200, 204, 302, 404, 418, 500]), BODIES), min_size=8, max_size=8))
def test_invalid_reply_costs_one_attempt_and_moves_to_another_server(lies):
    """Over HTTP: for any invalid reply of the first server, the results come from the second."""
    waiting = iter(lies)

    async def lie(body: dict[str, Any]) -> web.Response | None:
        found = next(waiting, None)
        if found is None:
            return None
        status, content = found
        if isinstance(content, tuple):
            answers = [good_answer(REQUEST) | {"meta_info": good_answer(REQUEST)["meta_info"] | {"id": body["rid"][0]}}]
            if content[0] == "cut":
                content = json.dumps(answers).encode()[: -content[1]]
            else:
                paths = places(answers[0])
                content = json.dumps([changed(answers[0], paths[content[0] % len(paths)], *content[1:])]).encode()
        return web.Response(status=status, body=content)

    async def truth(body: dict[str, Any]) -> web.Response:
        answer = good_answer(REQUEST)
        return web.json_response([answer | {"meta_info": answer["meta_info"] | {"id": rid}} for rid in body["rid"]])

    async def scenario(client: Any, urls: list[str]) -> None:
        requests = [GenerationRequest(f"r{i}", (3, 4, 5), 4, stop_strings=("##",), weight_version="7") for i in range(12)]
        for generation in await asyncio.gather(*[client.generate(request, alone=True) for request in requests]):
            assert_believable(requests[0], generation)

    run_with([FakeServer(lie), FakeServer(truth)], scenario, max_retries=4)
