"""Log-probs of given tokens under a reference that an SGLang server serves, such as a teacher too large for the trainer's GPUs."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_rl.errors import UserError
from megatron_rl.system.http.json_http import HttpError, HttpReply, HttpSession, NoHttpReply

_TRIES, _PAUSE_S, _DEADLINE_S, _AT_A_TIME = 3, 2.0, 600.0, 64
_MAX_ANSWER_BYTES = 1 << 28


async def served_logprobs(url: str, sequences: Sequence[tuple[np.ndarray, int]]) -> list[np.ndarray]:
    """Return for each sequence its log-probs [tokens - first] float32 from token ``first`` on, at temperature 1.

    ``sequences``: (token ids, first), first above 0. Raises UserError if the server refuses a sequence, or does not answer in
    several tries.
    """
    places = asyncio.Semaphore(_AT_A_TIME)

    async def one(ids: np.ndarray, first: int) -> np.ndarray:
        async with places:
            return await _scored(http, url, ids.tolist(), first)

    async with HttpSession(max_answer_bytes=_MAX_ANSWER_BYTES) as http:
        return await asyncio.gather(*(one(ids, first) for ids, first in sequences))


async def _scored(http: HttpSession, url: str, ids: list[int], first: int) -> np.ndarray:
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": first - 1,  # the log-prob at an index is that of the token after it
    }
    reason = ""
    for attempt in range(_TRIES):
        await asyncio.sleep(_PAUSE_S * attempt)
        try:
            reply = await http.post(f"{url}/generate", body, timeout_s=_DEADLINE_S)
        except NoHttpReply as error:
            reason = str(error)
            continue
        except HttpError as error:
            raise _failed(url, ids, str(error)) from error
        if reply.status == 200:
            return _read(reply, url, ids, first)
        reason = f"status {reply.status}: {reply.text[:200]}"
        if reply.status < 500:
            break
    raise _failed(url, ids, reason)


def _read(reply: HttpReply, url: str, ids: list[int], first: int) -> np.ndarray:
    try:
        entries: list[Any] = reply.json()["meta_info"]["input_token_logprobs"][first - len(ids) :]
        if [entry[1] for entry in entries] == ids[first:] and all(math.isfinite(entry[0]) for entry in entries):
            return np.array([entry[0] for entry in entries], np.float32)
    except (ValueError, RecursionError, LookupError, TypeError):
        pass
    raise _failed(url, ids, f"expected a finite log-prob of each token, got {reply.text[:200]}")


def _failed(url: str, ids: list[int], reason: str) -> UserError:
    return UserError(
        f"reference.path: the server {url} did not score a sequence of {len(ids):,} tokens ({reason}); see its log, and compare its "
        "context length with batch.max_prompt_tokens + batch.max_response_tokens. run.resume=auto continues from the last checkpoint"
    )
