"""Simulates a run's slots over sampled lengths: the responses of each step, their new tokens and their ends.

The rules are those of ``data/slots.py``, ``step/collect.py`` and ``rollout/windows.py``. Unfinished responses come first, then
new ones in groups of one prompt. A slot grows by at most a window; its first window is shorter by the jitter, and a small remainder
of its budget is added to the last one. In ``sync`` mode only whole groups train, and responses aborted by over-sampling are
discarded; in ``tppo`` mode they keep their tokens. Without a critic a finished response leaves its slot, and trains with its group.

Waits of dialogues for their environment, such as tool calls: a waiting response has no request at a server; once only such
responses are left, and have been for ``environment.step_wait_s``, a window ends, and full responses wait to the end. Two
simplifications make steps longer than they are: responses decode as fast as if nobody waited, and a wait that outlasts a
window goes on in the next window only, not while the trainer works.
"""

from dataclasses import dataclass, fields

import numpy as np

from megatron_rl.config.derived import max_remainder_tokens
from megatron_rl.desk.simulate.decoding import ServerRequests, ServerTrace, expected_tokens, serve, spread
from megatron_rl.desk.simulate.lengths import Draw, LengthDistribution
from megatron_rl.desk.simulate.recorded_run import parse_lengths
from megatron_rl.desk.simulate.scenario import Scenario
from megatron_rl.desk.simulate.timing import Timing
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


@dataclass(frozen=True)
class SlotResponses:
    """Responses in the order of the slots; [rows] int64 each."""

    prompt: np.ndarray
    held: np.ndarray
    """Response tokens from earlier steps."""
    new: np.ndarray
    """Tokens that this step generates."""
    total: np.ndarray
    """Tokens that the finished response will have."""
    group: np.ndarray
    first_window: np.ndarray
    """Largest number of tokens in the response's first window."""
    born: np.ndarray
    """The step in which the response started."""
    trained: np.ndarray
    """Response tokens that trained in earlier steps."""
    wait_s: np.ndarray
    """[rows] float64: rest of a wait for the environment that the last window did not wait for."""

    def __len__(self) -> int:
        return len(self.prompt)

    def pick(self, chosen: np.ndarray) -> "SlotResponses":
        return SlotResponses(**{item.name: getattr(self, item.name)[chosen] for item in fields(self)})

    def __add__(self, other: "SlotResponses") -> "SlotResponses":
        return SlotResponses(
            **{
                item.name: np.concatenate([getattr(self, item.name), getattr(other, item.name)])
                for item in fields(self)
            }
        )

    @property
    def ended(self) -> np.ndarray:
        return self.held + self.new >= self.total

    @property
    def row_tokens(self) -> np.ndarray:
        """Tokens that a trainer pass reads: prompt, earlier windows and this window."""
        return self.prompt + self.held + self.new


@dataclass(frozen=True)
class GeneratedStep:
    """The outcome of a generate stage."""

    generated: SlotResponses
    """All requests, including discarded ones."""
    trained: SlotResponses
    """The responses that the trainer's passes read; ``new`` counts the tokens that train."""
    server_s: tuple[float, ...]
    """Seconds of each server."""
    finished: SlotResponses | None = None
    """The responses that ended in this step; None means the finished ones of ``trained``."""


class SlotProcess:
    """Owns the slots and the draws; ``generate`` is called once per step, in order."""

    def __init__(
        self, scenario: Scenario, lengths: Draw, prompts: Draw, rng: np.random.Generator, waits: ToolWaits | None = None
    ) -> None:
        if waits is not None and scenario.over_samples:
            raise UserError("--tool-times: not simulated with rollout.over_sampling; set rollout.over_sampling=1")
        self._scenario, self._waits = scenario, waits
        self._lengths, self._prompts, self._rng = lengths, prompts, rng
        self._next_group = 0
        empty = {item.name: np.zeros(0, dtype=np.int64) for item in fields(SlotResponses)}
        self._slots = self._spare = self._waiting = SlotResponses(**empty)

    def generate(self, step: int, timing: Timing) -> GeneratedStep:
        self._fill(step)
        scenario, rows = self._scenario, self._slots
        wanted = np.minimum(rows.total - rows.held, _rooms(rows, scenario))
        served = serve_rows(SlotResponses(**{**vars(rows), "new": wanted}), scenario, timing)
        grown, until_s = self._cut_when_enough(wanted, served) if scenario.over_samples else (wanted, np.inf)
        wait_s, seconds = rows.wait_s, tuple(min(one.seconds, until_s) for one in served)
        if self._waits is not None:
            grown, wait_s, waited_s = self._with_waits(rows, wanted, served)
            seconds = (waited_s,) * len(served)
        done = SlotResponses(**{**vars(rows), "new": grown, "wait_s": wait_s})
        trained = finished = trained_rows(done, scenario)
        if scenario.facts.whole_groups:
            trained = self._whole_groups(finished)
        self._slots = self._carried(done)
        return GeneratedStep(done, trained, seconds, finished if scenario.facts.whole_groups else None)

    def _with_waits(self, rows: SlotResponses, wanted: np.ndarray, served: list[ServerTrace]) -> tuple[np.ndarray, np.ndarray, float]:
        """Return ([rows] tokens, [rows] rest of a wait, seconds) of a window in which responses wait for their environment."""
        assert self._waits is not None
        finish_s = np.zeros(len(wanted))
        for own, one in zip(spread(len(wanted), self._scenario.num_servers), served, strict=True):
            finish_s[own] = one.finish_s
        step_wait_s = self._scenario.step_wait_s if self._scenario.facts.windows else np.inf
        window = with_waits(
            wanted, finish_s, rows.held, rows.total, rows.wait_s, self._waits, rng=self._rng, step_wait_s=step_wait_s
        )
        return window.grown, window.left_s, window.seconds

    def _fill(self, step: int) -> None:
        missing = self._scenario.num_slots - len(self._slots)
        while len(self._spare) < missing:
            groups = -(-(missing - len(self._spare)) // self._scenario.group_size)
            self._spare += self._fresh_groups(groups, step)
        fresh = self._spare.pick(np.arange(missing))
        fresh = SlotResponses(**{**vars(fresh), "born": np.full(missing, step)})
        self._spare = self._spare.pick(np.arange(missing, len(self._spare)))
        self._slots += fresh

    def _fresh_groups(self, num_groups: int, step: int) -> SlotResponses:
        scenario, rng = self._scenario, self._rng
        size = num_groups * scenario.group_size
        prompt = np.repeat(self._prompts(rng, num_groups), scenario.group_size).astype(np.int64)
        total = np.minimum(self._lengths(rng, size), scenario.max_response_tokens).astype(np.int64)
        jitter = rng.integers(0, max(scenario.jitter_tokens, 1), size)
        group = self._next_group + np.arange(size) // scenario.group_size
        self._next_group += num_groups
        zero = np.zeros(size, dtype=np.int64)
        return SlotResponses(prompt, zero, zero, total, group, scenario.window_tokens - jitter, np.full(size, step), zero, np.zeros(size))

    def _cut_when_enough(self, wanted: np.ndarray, served: list[ServerTrace]) -> tuple[np.ndarray, float]:
        """Return ([rows] tokens generated until enough rows are complete to train, seconds until then).

        ``wanted``: [rows] tokens without this limit.
        """
        scenario = self._scenario
        places = spread(len(wanted), scenario.num_servers)
        finish_s = np.empty(len(wanted))
        for own, one in zip(places, served, strict=True):
            finish_s[own] = one.finish_s
        complete_s = finish_s if scenario.facts.windows else self._whole_groups_s(finish_s)
        needed = scenario.num_trained // (1 if scenario.facts.windows else scenario.group_size)
        enough_s = float(np.sort(complete_s)[needed - 1])
        grown = np.empty_like(wanted)
        for own, one in zip(places, served, strict=True):
            grown[own] = one.tokens_at(enough_s, wanted[own])
        return grown, enough_s

    def _whole_groups_s(self, finish_s: np.ndarray) -> np.ndarray:
        """Return the time at which each group's last response ends; groups are whole in sync mode."""
        return finish_s.reshape(-1, self._scenario.group_size).max(axis=1)

    def _whole_groups(self, ended: SlotResponses) -> SlotResponses:
        """Return the ended responses, of this or earlier steps, whose whole group has ended; the others keep waiting."""
        rows = self._waiting + ended
        _, place, size = np.unique(rows.group, return_inverse=True, return_counts=True)
        whole = size[place] == self._scenario.group_size
        self._waiting = rows.pick(np.flatnonzero(~whole))
        return rows.pick(np.flatnonzero(whole))

    def _carried(self, rows: SlotResponses) -> SlotResponses:
        if not self._scenario.facts.windows:
            return rows.pick(np.zeros(0, dtype=np.int64))
        left = rows.pick(np.flatnonzero(~rows.ended))
        held = left.held + left.new
        trained = np.where(_trains(left, self._scenario), held, left.trained)
        return SlotResponses(**{**vars(left), "held": held, "new": np.zeros_like(left.new), "trained": trained})


def serve_rows(
    rows: SlotResponses, scenario: Scenario, timing: Timing, num_servers: int | None = None
) -> list[ServerTrace]:
    """Simulate the servers on ``rows``, or only the first ``num_servers`` of them."""
    room = np.maximum(_rooms(rows, scenario), rows.new)
    requests = ServerRequests(rows.prompt + rows.held, rows.new, room, expected_tokens(rows.new, room))
    return [
        serve(requests.pick(own), timing, scenario.limits) for own in spread(len(rows), scenario.num_servers)[:num_servers]
    ]


def _rooms(rows: SlotResponses, scenario: Scenario) -> np.ndarray:
    """Return [rows] the tokens that each request may generate at most. Recorded rows do not tell their first window's jitter."""
    is_first = (rows.held == 0) & (rows.first_window > 0)
    room = np.where(is_first, rows.first_window, scenario.window_tokens)
    left = scenario.max_response_tokens - rows.held
    return np.where(left - room <= max_remainder_tokens(scenario.window_tokens), left, room)


def trained_rows(rows: SlotResponses, scenario: Scenario) -> SlotResponses:
    """Return the generated rows that train the policy; with ``whole_groups``, once their whole group has ended."""
    if not scenario.facts.windows and scenario.over_samples:
        whole = np.repeat(rows.ended.reshape(-1, scenario.group_size).all(axis=1), scenario.group_size)
        return rows.pick(np.flatnonzero(whole)[: scenario.num_trained])
    trains = rows.pick(np.flatnonzero(_trains(rows, scenario)))
    return SlotResponses(**{**vars(trains), "held": trains.trained, "new": trains.held + trains.new - trains.trained})


def _trains(rows: SlotResponses, scenario: Scenario) -> np.ndarray:
    """Return [rows] bool: True if a row trains in this step on all tokens that have not trained (``step/stages/generate.py``)."""
    untrained = rows.held + rows.new - rows.trained
    jitter = np.where(rows.trained == 0, scenario.window_tokens - rows.first_window, 0)
    return (untrained > 0) & (rows.ended | (untrained >= scenario.facts.training_window_tokens - jitter))
