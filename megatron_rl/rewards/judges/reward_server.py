"""Reward ``http``: an external service computes the score.

Each request POSTs JSON to ``url``: ``{"response", "answer", ...fields of the row}``; the reply is ``{"score": number,
"detail"?: text}``. With ``batch_size`` above 1 a request is a list of such objects and the reply a list of scores in
the same order. A service that cannot score replies ``{"score": null, "error": text}``.

Invariants: a score that is missing, not finite, outside ``[low, high]`` or superfluous leaves the item unscored and is
never read as 0. A rejected batch is resent one item at a time, so that one bad item does not affect the others.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from megatron_rl.data.trajectory import Prompt, Score
from megatron_rl.rewards.registry import RewardError, register
from megatron_rl.rewards.workers.session import RewardCallError, post_json

_TICK_S = 0.005
"""Seconds that a batch waits for more items."""

_batches: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, "_RequestBatch"]] = WeakKeyDictionary()


def _check(options: Mapping[str, Any]) -> None:
    check_url("http", options.get("url"))
    low, high = _value_range(options)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise RewardError(f"reward 'http': expected low < high, got {low} and {high}")
    if options.get("batch_size", 1) < 1:
        raise RewardError(f"reward 'http': expected batch_size >= 1, got {options['batch_size']}")
    fields = options.get("fields")
    if fields is not None and not (isinstance(fields, list) and all(isinstance(name, str) for name in fields)):
        raise RewardError(f"reward 'http': option fields must be a list of field names, got {fields!r}")


def check_url(name: str, url: Any) -> None:
    """Raise RewardError for a value that is not the address of an HTTP server."""
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise RewardError(f"reward {name!r}: set option url to http://host:port and a path, got {url!r}")


def check_prompts(prompts: Sequence[Prompt], options: Mapping[str, Any]) -> list[str]:
    """Problems, with file and line, of prompts without a field that must be sent."""
    always = {"prompt", "type", "answer"}
    return [
        f"{prompt.source or prompt.id}: field {name!r} is missing"
        for prompt in prompts
        for name in options.get("fields") or ()
        if name not in always and prompt.fields.get(name) is None
    ]


def _value_range(options: Mapping[str, Any]) -> tuple[float, float]:
    return float(options.get("low", 0.0)), float(options.get("high", 1.0))


@dataclass(frozen=True)
class HttpOptions:
    url: str = ""
    """URL that requests are POSTed to; must be set."""
    fields: list[str] | None = None
    """Names of the row fields to send; by default all fields that the run reads."""
    low: float = 0.0
    """Smallest score that the service may return."""
    high: float = 1.0
    """Largest score that the service may return."""
    batch_size: int = 1
    """Maximum number of items per request."""
    headers: dict[str, str] | None = None
    """Additional HTTP headers."""


@register(
    "http",
    check=_check,
    check_prompts=check_prompts,
    range=_value_range,
    row_fields={"row": ("*",)},
    answer_required=False,
)
async def score(
    response: str,
    answer: str,
    *,
    row: dict[str, Any] | None = None,
    options: HttpOptions = HttpOptions(),
) -> Score:
    """Score from the service.

    Args:
        row: The item's row; not an option.
    """
    row, fields = row or {}, options.fields
    missing = [name for name in fields or () if name not in row]
    if missing:
        return Score(None, error=f"the row lacks {', '.join(missing)}")
    sent = {name: row[name] for name in fields} if fields is not None else row
    body = {**sent, "response": response, "answer": answer}
    if options.batch_size == 1:
        reply = await post_json(options.url, body, headers=options.headers)
    else:
        reply = await _post_in_batch(options.url, body, options.batch_size, options.headers)
    return read_verdict(reply, options.low, options.high)


def read_verdict(verdict: Any, low: float, high: float) -> Score:
    """Parse the service's reply for one item."""
    if not isinstance(verdict, dict) or "score" not in verdict:
        return Score(None, error=f'expected {{"score": number}}, got {str(verdict)[:200]}')
    value, detail = verdict["score"], str(verdict.get("detail") or "")
    if value is None:
        return Score(None, detail, str(verdict.get("error") or "the service gave no score"))
    if isinstance(value, bool):
        value = float(value)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return Score(None, detail, f"expected a finite number as score, got {str(value)[:80]!r}")
    if not low <= value <= high:
        return Score(None, detail, f"the score {value:g} is outside [{low:g}, {high:g}] (options low and high)")
    return Score(float(value), detail)


class _RequestBatch:
    """Items that wait for a common request."""

    def __init__(self, url: str, headers: dict[str, str] | None) -> None:
        self.url = url
        self.headers = headers
        self.bodies: list[dict[str, Any]] = []
        self.answers: list[asyncio.Future[Any]] = []
        self.sending: asyncio.Task[None] | None = None

    async def send(self) -> None:
        try:
            verdicts = await self._verdicts()
        except Exception as error:  # every waiting item must get the error
            verdicts = [error] * len(self.bodies)
        # A caller may have been cancelled while the batch was in progress: its future is already done.
        for answer, verdict in zip(self.answers, verdicts, strict=True):
            if answer.done():
                continue
            if isinstance(verdict, Exception):
                answer.set_exception(verdict)
            else:
                answer.set_result(verdict)

    async def _verdicts(self) -> list[Any]:
        try:
            verdicts = await post_json(self.url, self.bodies, headers=self.headers)
            if not isinstance(verdicts, list) or len(verdicts) != len(self.bodies):
                raise RewardCallError(f"{self.url}: expected a list of {len(self.bodies)} scores, got {str(verdicts)[:200]}")
            return verdicts
        except RewardCallError:
            if len(self.bodies) == 1:
                raise
            alone = [post_json(self.url, [body], headers=self.headers) for body in self.bodies]
            replies = await asyncio.gather(*alone, return_exceptions=True)
            return [v[0] if isinstance(v, list) and len(v) == 1 else v for v in replies]


async def _post_in_batch(url: str, body: dict[str, Any], batch_size: int, headers: dict[str, str] | None) -> Any:
    loop = asyncio.get_running_loop()
    open_batches = _batches.setdefault(loop, {})
    # Items with different headers must not share a request.
    key = f"{url} {sorted((headers or {}).items())}"
    if key not in open_batches:
        open_batches[key] = _RequestBatch(url, headers)
        loop.call_later(_TICK_S, _send, loop, key, open_batches[key])
    batch = open_batches[key]
    answer: asyncio.Future[Any] = loop.create_future()
    batch.bodies.append(body)
    batch.answers.append(answer)
    if len(batch.bodies) >= batch_size:
        _send(loop, key, batch)
    return await answer


def _send(loop: asyncio.AbstractEventLoop, key: str, batch: _RequestBatch) -> None:
    if batch.sending is None:  # called when the batch is full and when its time is up
        if _batches[loop].get(key) is batch:
            del _batches[loop][key]
        batch.sending = loop.create_task(batch.send())
