"""One ``/generate`` call of SGLang for a batch of samples: request body, POST and the result of each sample.

Runs next to the HTTP session: on the client's event loop, or in a rollout worker (``rollout/workers``). Calls and
replies are picklable.

The long lists of a reply, token ids and ``[log-prob, id, null]``, become arrays without a Python object per token.
``read_json`` returns what orjson would, but with an array [n] int32 of ids, none negative, and a tuple (ids [n]
int32, log-probs [n] float32) instead of those lists. It checks nothing: if the lists are not formatted as SGLang
0.5.23 formats them, orjson reads the whole reply, and ``response_validation.py`` reports what is wrong with it.
orjson also reads short replies, and all replies until the loops are compiled. Compiling takes a second or two on a
separate thread, once per process, and is not cached on disk (see ``algorithms/cpu_loops.py``).

A log-prob is the float32 nearest to the float64 in the text, as numpy would convert it. If the quick product of
digits and a power of ten leaves a doubt, orjson reads the reply. The reader saves a rollout worker about half of
its CPU time for replies without routes (docs/benchmarks.md).
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
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
from megatron_rl.rollout.sglang.wire.protocol import generate_body, max_answer_bytes, parse_generation
from megatron_rl.rollout.sglang.wire.response_validation import InvalidReply, abbreviate, as_list, expected_error
from megatron_rl.system.http.json_http import HttpSession, bearer

_SHOWN_CHARACTERS = 500
SHORTEST = 1 << 15
"""Bytes of the shortest reply that is worth it: about a thousand tokens."""
_IDS, _PAIRS = b'"output_ids":[', b'"output_token_logprobs":[['
_SURE = 2.0**-50
"""Upper bound for the relative error of the fast product."""


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
    # Routes take thousands of bytes per token: cutting the lists out copies such a reply, which costs more than it saves.
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


# -------------------------------------------------------------------------------------------------------- reading a reply


def read_json(content: bytes) -> Any:
    """Parse a reply. Raises ValueError if it is not JSON."""
    if len(content) >= SHORTEST and (loops := loops_in_background()).done():
        samples = with_arrays(content, *loops.result())
        if samples is not None:
            return samples
    return orjson.loads(content)


def with_arrays(content: bytes, read_ids: Callable[..., int], read_pairs: Callable[..., int]) -> Any:
    """Parse ``content`` with the compiled loops. Returns None if the long lists are not formatted as expected."""
    text = np.frombuffer(content, np.uint8)
    # Inside a JSON string these keys cannot occur, because quotes are escaped there.
    ids, pairs = list(_spans(content, _IDS, b"]")), list(_spans(content, _PAIRS, b"]]"))
    cuts = sorted([*ids, *pairs])
    if any(one[1] > two[0] for one, two in pairwise(cuts)):
        return None
    borders = [0, *(border for cut in cuts for border in cut), len(content)]
    try:
        samples = orjson.loads(b"".join(content[start:end] for start, end in zip(borders[::2], borders[1::2], strict=True)))
    except ValueError:
        return None
    if not isinstance(samples, list) or len(samples) != len(ids) or len(samples) != len(pairs):
        return None
    for sample, of_ids, of_pairs in zip(samples, ids, pairs, strict=True):
        meta = sample.get("meta_info") if isinstance(sample, dict) else None
        if not isinstance(meta, dict) or sample.get("output_ids") != [] or meta.get("output_token_logprobs") != [[]]:
            return None
        numbers, tokens = _room(of_ids, 2), _room(of_pairs, 10)
        logprobs = np.empty(len(tokens), np.float32)
        num_ids, num_pairs = read_ids(text, *of_ids, numbers), read_pairs(text, *of_pairs, tokens, logprobs)
        if num_ids < 0 or num_pairs < 0:
            return None
        sample["output_ids"] = numbers[:num_ids].copy()
        meta["output_token_logprobs"] = tokens[:num_pairs].copy(), logprobs[:num_pairs].copy()
    return samples


def _spans(content: bytes, opening: bytes, closing: bytes) -> Iterator[tuple[int, int]]:
    """(start, end) of the text between each ``opening`` and the next ``closing``."""
    place = content.find(opening)
    while place >= 0:
        start = place + len(opening)
        end = content.find(closing, start)
        if end < 0:
            return
        yield start, end
        place = content.find(opening, end)


def _room(span: tuple[int, int], shortest: int) -> np.ndarray:
    """Array with room for all entries in ``span``, each at least ``shortest`` bytes long with its comma."""
    return np.empty((span[1] - span[0]) // shortest + 1, np.int32)


@cache
def loops_in_background() -> "Future[tuple[Callable[..., int], Callable[..., int]]]":
    """The result of ``compiled_loops``, which starts to compile on a separate thread with the first call."""
    return ThreadPoolExecutor(1, thread_name_prefix="compile").submit(compiled_loops)


@cache
def compiled_loops() -> tuple[Callable[..., int], Callable[..., int]]:
    """(read ids, read pairs): compiled ``(text, start, end, results...)`` -> number of entries read, or -1."""
    import numba  # lazy: the import takes a third of a second, and short runs do not need it

    jit = numba.njit(nogil=True)
    # Compiled functions call other compiled functions only if these are passed as arguments.
    whole_number, mantissa, exponent, any_number = jit(_whole_number), jit(_mantissa), jit(_exponent), jit(_number)
    number = jit(lambda text, place, end: any_number(text, place, end, mantissa, exponent))
    ids_loop, pairs_loop, is_next = jit(_read_ids), jit(_read_pairs), jit(_is_next)

    def read_ids(text: np.ndarray, start: int, end: int, ids: np.ndarray) -> int:
        return int(ids_loop(text, start, end, ids, whole_number))

    def read_pairs(text: np.ndarray, start: int, end: int, ids: np.ndarray, logprobs: np.ndarray) -> int:
        return int(pairs_loop(text, start, end, ids, logprobs, whole_number, number, is_next))

    sample, ids = np.frombuffer(b"-0.5,1,null", np.uint8), np.zeros(2, np.int32)
    read_ids(sample[5:6], 0, 1, ids)
    read_pairs(sample, 0, len(sample), ids, np.zeros(2, np.float32))
    return read_ids, read_pairs


def _read_ids(text: np.ndarray, start: int, end: int, ids: np.ndarray, whole_number: Any) -> int:
    place, count = start, 0
    while place < end:
        value, place = whole_number(text, place, end)
        if place < 0 or (place < end and (text[place] != 44 or place + 1 == end)):
            return -1
        ids[count] = value
        count += 1
        place += 1
    return count


def _read_pairs(
    text: np.ndarray, start: int, end: int, ids: np.ndarray, logprobs: np.ndarray, whole_number: Any, number: Any, is_next: Any
) -> int:
    place, count = start, 0
    while place < end:
        value, place = number(text, place, end)
        if place < 0 or not is_next(text, place, end, b","):
            return -1
        token, place = whole_number(text, place + 1, end)
        if place < 0 or not is_next(text, place, end, b",null"):
            return -1
        place += 5
        if place < end:
            if place + 3 >= end or not is_next(text, place, end, b"],["):
                return -1
            place += 3
        ids[count], logprobs[count] = token, value
        count += 1
    return count


def _is_next(text: np.ndarray, place: int, end: int, word: bytes) -> bool:
    if place + len(word) > end:
        return False
    for index in range(len(word)):  # noqa: SIM110  a compiled loop
        if text[place + index] != word[index]:
            return False
    return True


def _whole_number(text: np.ndarray, place: int, end: int) -> tuple[int, int]:
    """(value, position after it); position -1 without a whole number below 2^31."""
    value, first = 0, place
    while place < end and 48 <= text[place] <= 57 and place - first < 11:
        value = value * 10 + (text[place] - 48)
        place += 1
    if place == first or value >= 2147483648:
        return 0, -1
    return value, place


def _number(text: np.ndarray, place: int, end: int, mantissa: Any, exponent: Any) -> tuple[np.float32, int]:
    """(number at ``place``, position after it); position -1 if there is none or its float32 rounding is in doubt."""
    negative = place < end and text[place] == 45
    digits, scale, place = mantissa(text, place + negative, end)
    if place >= 0 and place < end and (text[place] == 101 or text[place] == 69):
        power, place = exponent(text, place + 1, end)
        scale -= power
    if place < 0 or not 0 <= scale <= 44:
        return np.float32(0.0), -1
    # Powers of ten up to 22 are exact: at most three roundings.
    value = float(digits) / 10.0 ** min(scale, 22) / 10.0 ** max(scale - 22, 0)
    if np.float32(value * (1.0 - _SURE)) != np.float32(value * (1.0 + _SURE)):
        return np.float32(0.0), -1
    return np.float32(-value if negative else value), place


def _mantissa(text: np.ndarray, place: int, end: int) -> tuple[int, int, int]:
    """(digits as a whole number, number of digits after the point, position after them); position -1 for more than
    18 digits."""
    digits, scale, num_digits, behind_point, first = 0, 0, 0, False, place
    while place < end and (48 <= text[place] <= 57 or (text[place] == 46 and not behind_point)):
        if text[place] == 46:
            behind_point = True
        else:
            digits = digits * 10 + (text[place] - 48)
            num_digits += digits > 0
            scale += behind_point
            if num_digits > 18:
                return 0, 0, -1
        place += 1
    return digits, scale, place if place > first else -1


def _exponent(text: np.ndarray, place: int, end: int) -> tuple[int, int]:
    """(value, position after it); position -1 without an exponent."""
    falls = place < end and text[place] == 45
    if place < end and (text[place] == 45 or text[place] == 43):
        place += 1
    value, first = 0, place
    while place < end and 48 <= text[place] <= 57 and place - first < 4:
        value = value * 10 + (text[place] - 48)
        place += 1
    return -value if falls else value, place if place > first else -1
