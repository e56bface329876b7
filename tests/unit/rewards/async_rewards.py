"""Async rewards for tests: valid ones, and ones that misbehave as the response requests."""

import asyncio
import threading
import time
from collections import Counter

from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.registry import register
from megatron_rl.rewards.workers.session import Transient

calls: Counter[str] = Counter()
"""Number of calls per response."""
in_progress = 0
most_in_progress = 0


async def exact(response: str, answer: str) -> float:
    """1.0 if the response equals the answer."""
    calls[response] += 1
    return float(response == answer)


async def misbehave(response: str, answer: str, *, scale: float = 1.0) -> "float | Score":
    """Misbehaves as the first word of the response requests; otherwise scores its length."""
    calls[response] += 1
    kind, _, rest = response.partition(" ")
    await _wait(kind, rest)
    _fail(kind, response)
    return _answers().get(kind, scale * len(response))


async def _wait(kind: str, rest: str) -> None:
    match kind:
        case "sleep":
            await asyncio.sleep(float(rest))
        case "stubborn":
            for _ in range(20):
                try:
                    await asyncio.sleep(0.1)
                except asyncio.CancelledError:
                    continue
        case "block":
            time.sleep(float(rest))
        case "cancel":
            asyncio.current_task().cancel()
            await asyncio.sleep(0)


def _fail(kind: str, response: str) -> None:
    match kind:
        case "raise":
            raise ValueError("the reward's own mistake")
        case "exit":
            raise SystemExit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "cancelled":
            raise asyncio.CancelledError
        case "transient":
            raise Transient("the server is busy")
        case "once":
            if calls[response] == 1:
                raise ConnectionResetError("try again")


def _answers() -> dict[str, float | Score | None]:
    detail = Score(0.5, "half", metrics={"mass": 0.25, "strange": float("inf")})
    return {"nan": float("nan"), "nothing": None, "detail": detail}


async def crowd(response: str, answer: str) -> float:
    """Records the number of concurrent calls."""
    global in_progress, most_in_progress
    in_progress += 1
    most_in_progress = max(most_in_progress, in_progress)
    await asyncio.sleep(0.01)
    in_progress -= 1
    return 1.0


async def thread_name(response: str, answer: str) -> Score:
    return Score(1.0, threading.current_thread().name)


@register("test_signed", range=(-1.0, 1.0))
async def signed(response: str, answer: str) -> float:
    """Score: the number in the response."""
    calls[response] += 1
    return float(response)


@register("test_unit", range=(0.0, 1.0))
async def unit(response: str, answer: str, *, tests: str) -> Score:
    """1.0 if the response equals the answer; needs a row field."""
    calls[response] += 1
    return Score(float(response == answer), f"tests {tests}")


@register("test_free", range=(0.0, 1.0), row_fields={"hint": ("hint", "clue"), "row": ("*",)})
async def free(response: str, answer: str, *, prompt: str, hint: str = "none", row: dict | None = None) -> Score:
    """Returns its arguments as detail."""
    return Score(1.0, f"{prompt}|{hint}|{','.join(sorted(row))}")
