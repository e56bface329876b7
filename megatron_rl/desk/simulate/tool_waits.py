"""Waits of dialogues for their environment, such as tool calls, in a simulated window: when it ends, and which tokens it has by then.

The rules are those of ``rollout/windows.py``: a waiting response has no request at a server; once only such responses are left, and
have been for ``environment.step_wait_s``, a window ends, and full responses wait to the end. Two simplifications make steps longer
than they are: responses decode as fast as if nobody waited, and a wait that outlasts a window goes on in the next window only, not
while the trainer works.
"""

from dataclasses import dataclass

import numpy as np

from megatron_rl.desk.simulate.lengths import LengthDistribution
from megatron_rl.desk.simulate.recorded_run import parse_lengths
from megatron_rl.errors import UserError


@dataclass(frozen=True)
class ToolWaits:
    """A call after every ``turn_tokens`` generated tokens, and the distribution of its milliseconds."""

    turn_tokens: int
    milliseconds: LengthDistribution

    def draw_s(self, rng: np.random.Generator, number: int) -> np.ndarray:
        return self.milliseconds.draw(rng, number) / 1e3


@dataclass(frozen=True)
class WaitedWindow:
    grown: np.ndarray
    """[rows] tokens by the end of the window."""
    left_s: np.ndarray
    """[rows] seconds of a wait that the window did not wait for."""
    seconds: float


def parse_waits(words: str | None) -> ToolWaits | None:
    """Parse ``TURN_TOKENS:DISTRIBUTION``, such as 400:lognormal:median=3000,sigma=1. Raises UserError."""
    if not words:
        return None
    tokens, _, distribution = words.partition(":")
    if not tokens.isdecimal() or not int(tokens) or not distribution:
        raise UserError(
            f"--tool-times {words}: expected TURN_TOKENS:DISTRIBUTION, the generated tokens between two calls and the milliseconds of a "
            "call, such as 400:lognormal:median=3000,sigma=1"
        )
    return ToolWaits(int(tokens), parse_lengths(distribution))


def with_waits(
    wanted: np.ndarray, decode_s: np.ndarray, held: np.ndarray, total: np.ndarray, left_s: np.ndarray, waits: ToolWaits,
    *, rng: np.random.Generator, step_wait_s: float,
) -> WaitedWindow:  # fmt: skip
    """Place the calls of a window's rows between their tokens. [rows] each.

    Args:
        wanted: Tokens of the window without waits, which take ``decode_s``.
        held, total: Tokens from earlier windows, and of the finished response, after which there is no call.
        left_s: Rest of a wait from the window before.
        step_wait_s: inf for full responses.
    """
    calls = np.minimum(held + wanted, total - 1) // waits.turn_tokens - np.minimum(held, total - 1) // waits.turn_tokens
    offsets = np.concatenate([[0], np.cumsum(calls)])
    drawn = waits.draw_s(rng, int(offsets[-1]))
    stretches = []
    for row in range(len(wanted)):
        ends = waits.turn_tokens * (held[row] // waits.turn_tokens + 1 + np.arange(calls[row])) - held[row]
        before_s = left_s[row] + np.concatenate([[0.0], np.cumsum(drawn[offsets[row] : offsets[row + 1]])])
        tokens = np.concatenate([[0], ends, [wanted[row]]])
        at_s = tokens * (decode_s[row] / max(wanted[row], 1))
        stretches.append((at_s[:-1] + before_s, at_s[1:] + before_s, tokens))
    seconds = _end_s(stretches, left_s, step_wait_s)
    grown, rest = np.zeros_like(wanted), np.zeros(len(wanted))
    for row, (begins_s, ends_s, tokens) in enumerate(stretches):
        place = int(np.searchsorted(begins_s, seconds, side="right")) - 1
        if place >= 0:
            share = min((seconds - begins_s[place]) / max(ends_s[place] - begins_s[place], 1e-12), 1.0)
            grown[row] = tokens[place] + int(share * (tokens[place + 1] - tokens[place]) + 1e-9)
        waiting = place + 1 < len(begins_s) and (place < 0 or ends_s[place] <= seconds)
        rest[row] = begins_s[place + 1] - seconds if waiting else 0.0
    return WaitedWindow(grown, rest, seconds)


def _end_s(stretches: list[tuple[np.ndarray, np.ndarray, np.ndarray]], left_s: np.ndarray, step_wait_s: float) -> float:
    """End of the window: the first pause of all rows of ``step_wait_s``, or the end of the last stretch."""
    begins_s, ends_s = (np.concatenate([one[i] for one in stretches]) for i in (0, 1))
    order = np.argsort(begins_s, kind="stable")
    so_far = np.maximum.accumulate(ends_s[order])
    # A step without any token would train on nothing, so the first pause does not count.
    pauses = np.flatnonzero(begins_s[order][1:] - so_far[:-1] > step_wait_s)
    return float(so_far[pauses[0]] + step_wait_s) if len(pauses) else float(so_far[-1])
