"""Log-probs of given tokens under the model of an SGLang server, such as a teacher too large for the trainer's GPUs."""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_rl.errors import UserError
from megatron_rl.system.http.json_http import HttpError, HttpReply, HttpSession, NoHttpReply, bearer

_TRIES, _PAUSE_S, _DEADLINE_S, _AT_A_TIME = 3, 2.0, 600.0, 64
_MAX_ANSWER_BYTES = 1 << 28


class Scores(NamedTuple):
    """A server's scores of the tokens of one sequence from the token ``first`` on."""

    logprobs: np.ndarray
    """[tokens] float32, of each token itself."""
    top_ids: np.ndarray
    """[tokens, k] int32: the k most likely tokens at its position, the most likely first."""
    top_logprobs: np.ndarray
    """[tokens, k] float32."""


async def served_logprobs(
    url: str, sequences: Sequence[tuple[np.ndarray, int]], *, api_key: str = "", top_k: int = 0
) -> list[Scores]:
    """Return the scores of each sequence, (token ids, first) with first above 0, at temperature 1.

    Raises UserError if the server refuses a sequence or the key, or does not answer in several tries.
    """
    places = asyncio.Semaphore(_AT_A_TIME)

    async def one(ids: np.ndarray, first: int) -> Scores:
        body = {
            "input_ids": ids.tolist(),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": first - 1,  # the log-prob at an index is that of the token after it
            **({"top_logprobs_num": top_k} if top_k else {}),
        }
        async with places:
            return _read(await _reply(http, url, api_key, body), url, body["input_ids"], first, top_k)

    async with HttpSession(max_answer_bytes=_MAX_ANSWER_BYTES) as http:
        return await asyncio.gather(*(one(ids, first) for ids, first in sequences))


async def _reply(http: HttpSession, url: str, api_key: str, body: dict[str, Any]) -> HttpReply:
    reason = ""
    for attempt in range(_TRIES):
        await asyncio.sleep(_PAUSE_S * attempt)
        try:
            reply = await http.post(f"{url}/generate", body, timeout_s=_DEADLINE_S, headers=bearer(api_key))
        except NoHttpReply as error:
            reason = str(error)
            continue
        except HttpError as error:
            raise _failed(url, body["input_ids"], str(error)) from error
        if reply.status == 200:
            return reply
        reason = f"status {reply.status}: {reply.text[:200]}"
        if reply.status < 500:
            break
    raise _failed(url, body["input_ids"], reason)


def _read(reply: HttpReply, url: str, ids: list[int], first: int, top_k: int) -> Scores:
    try:
        meta, length = reply.json()["meta_info"], len(ids) - first
        entries: list[Any] = meta["input_token_logprobs"][-length:]
        top: list[Any] = meta["input_top_logprobs"][-length:] if top_k else [[]] * length
        logprobs = np.array([entry[0] for entry in entries], np.float32)
        table = np.array([[entry[:2] for entry in of] for of in top], np.float64).reshape(length, top_k, 2)
        # SGLang writes 0 in place of the vocabulary's last token.
        is_aligned = len(entries) == length and all(entry[1] in (own, 0) for entry, own in zip(entries, ids[first:], strict=True))
        if is_aligned and np.isfinite(logprobs).all() and np.isfinite(table).all():
            return Scores(logprobs, table[..., 1].astype(np.int32), table[..., 0].astype(np.float32))
    except (ValueError, RecursionError, LookupError, TypeError, OverflowError):
        pass
    others = f" and of {top_k} most likely" if top_k else ""
    raise _failed(url, ids, f"expected a finite log-prob of each token{others}, got {reply.text[:200]}")


def _failed(url: str, ids: list[int], reason: str) -> UserError:
    return UserError(
        f"the server {url} did not score a sequence of {len(ids):,} tokens ({reason}); see its log, and compare its context length with "
        "batch.max_prompt_tokens + batch.max_response_tokens and its API key with reference.api_key_env. run.resume=auto continues from "
        "the last checkpoint"
    )
