"""One call of SGLang's ``/generate`` for a batch of samples: its body, the POST, and what came of each sample.

Runs where the HTTP session is: on the client's event loop (``HttpHere``), or in a rollout worker (``rollout/workers``).
What a call and a reply hold can travel between processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from megatron_rl.rollout.sglang.answer_checks import BadAnswer, as_list, mismatch, shown
from megatron_rl.rollout.sglang.long_lists import read_json
from megatron_rl.rollout.sglang.wire import (
    AttemptFailed,
    Generation,
    GenerationRequest,
    PromptMismatch,
    RequestRejected,
    generate_body,
    max_answer_bytes,
    parse_generation,
)
from megatron_rl.system.http import ApiKey, HttpSession, bearer

_SHOWN_CHARACTERS = 500


@dataclass(frozen=True)
class BatchCall:
    """``requests`` have been validated; ``rids`` are those that they are sent with."""

    url: str
    """Of the server."""
    requests: Sequence[GenerationRequest]
    rids: Sequence[str]
    timeout_s: float | None
    """None: the caller ends the wait."""
    vocab_size: int
    api_key: ApiKey


@dataclass(frozen=True)
class BatchReply:
    status: int
    samples: Sequence[Generation | Exception] = ()
    """With status 200, one per request: BadAnswer, RequestRejected, PromptMismatch or AttemptFailed where it has none."""
    text: str = ""
    """With another status, how the answer begins."""
    retry_after_s: float | None = None


class BatchCaller(Protocol):
    """Makes calls to any number of servers at once."""

    async def call(self, batch: BatchCall) -> BatchReply:
        """Raises HttpError or NoAnswer, and BadAnswer for an answer that is not one of this batch."""
        ...

    async def close(self) -> None: ...


class HttpHere:
    """Calls from this event loop."""

    def __init__(self, http: HttpSession) -> None:
        self._http = http

    async def call(self, batch: BatchCall) -> BatchReply:
        return await exchange(self._http, batch)

    async def close(self) -> None:
        """The session is another's to close."""


async def exchange(http: HttpSession, batch: BatchCall) -> BatchReply:
    """As ``BatchCaller.call``."""
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
    try:
        samples = as_list(read_json(answer.content), "the answer")
        if len(samples) != len(batch.requests):
            raise BadAnswer(f"{len(samples)} answers came to {len(batch.requests)} requests")
    except (ValueError, BadAnswer) as error:
        raise BadAnswer(f"{error}; it begins with {shown(answer.text[:200])}") from error
    each = zip(batch.requests, batch.rids, samples, strict=True)
    return BatchReply(200, [_sample(request, rid, sample, batch.vocab_size) for request, rid, sample in each])


def _sample(request: GenerationRequest, rid: str, sample: Any, vocab_size: int) -> Generation | Exception:
    try:
        generation = parse_generation(request, sample, vocab_size)
        if (found := sample["meta_info"].get("id", rid)) != rid:
            raise mismatch("meta_info.id", repr(rid), found)
    except (BadAnswer, RequestRejected, PromptMismatch, AttemptFailed) as error:
        return error
    return generation
