"""One ``/generate`` call of SGLang for a batch of samples: request body, POST and the result of each sample.

Runs next to the HTTP session: on the client's event loop (``InProcessCaller``), or in a rollout worker (``rollout/workers``).
Calls and replies are picklable.
"""

from typing import Any

import orjson

from megatron_rl.rollout.requests import (
    BatchCall,
    BatchReply,
    Generation,
    GenerationRequest,
    PromptMismatch,
    RequestRejected,
    RetryableRequestError,
)
from megatron_rl.rollout.sglang.wire.json_arrays import read_json
from megatron_rl.rollout.sglang.wire.protocol import generate_body, max_answer_bytes, parse_generation
from megatron_rl.rollout.sglang.wire.response_validation import InvalidReply, abbreviate, as_list, expected_error
from megatron_rl.system.http.json_http import HttpSession, bearer

_SHOWN_CHARACTERS = 500


class InProcessCaller:
    """Makes calls from this event loop."""

    def __init__(self, http: HttpSession) -> None:
        self._http = http

    async def call(self, batch: BatchCall) -> BatchReply:
        return await exchange(self._http, batch)

    async def close(self) -> None:
        """Does nothing: the session's owner closes it."""


async def exchange(http: HttpSession, batch: BatchCall) -> BatchReply:
    """Send a batch; same contract as ``BatchCaller.call``."""
    answer = await http.request(
        "POST",
        batch.url + "/generate",
        orjson.dumps(generate_body(batch.requests, batch.rids), option=orjson.OPT_SERIALIZE_NUMPY),
        timeout_s=batch.timeout_s,
        headers=bearer(batch.api_key),
        max_answer_bytes=max_answer_bytes(batch.requests),
    )
    if answer.status != 200:
        return BatchReply(answer.status, text=answer.text[:_SHOWN_CHARACTERS], retry_after_s=answer.retry_after_s)
    # Routes take thousands of bytes per token: to cut the lists out of such an answer copies it, and costs more than it saves.
    read = orjson.loads if any(request.routes is not None for request in batch.requests) else read_json
    try:
        samples = as_list(read(answer.content), "the reply")
        if len(samples) != len(batch.requests):
            raise InvalidReply(f"{len(batch.requests)} requests got {len(samples)} replies")
    except (ValueError, InvalidReply) as error:
        raise InvalidReply(f"{error}; it starts with {abbreviate(answer.text[:200])}") from error
    each = zip(batch.requests, batch.rids, samples, strict=True)
    return BatchReply(200, [_sample(request, rid, sample, batch.vocab_size) for request, rid, sample in each])


def _sample(request: GenerationRequest, rid: str, sample: Any, vocab_size: int) -> Generation | Exception:
    try:
        generation = parse_generation(request, sample, vocab_size)
        if (got := sample["meta_info"].get("id", rid)) != rid:
            raise expected_error("meta_info.id", repr(rid), got)
    except (InvalidReply, RequestRejected, PromptMismatch, RetryableRequestError) as error:
        return error
    return generation
