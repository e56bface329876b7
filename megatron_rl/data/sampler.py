"""Samples prompts in a deterministic, resumable order: mixtures by weight and a curriculum by step.

Laws: the state (phase, draws of each type in it, epoch and position of each type) and the seed determine all later
draws, in any grouping. A type shows each of its prompts once per epoch, each epoch in its own order. Within a
phase, the number of draws of a type always differs from its share by less than 1.

Without weights all prompts are one stream: every prompt once per epoch, regardless of type. With weights, every
type of the data needs a weight in every phase; 0 excludes the type.
"""

import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from megatron_rl.config.schema import CurriculumPhase
from megatron_rl.data.trajectory import Prompt
from megatron_rl.errors import DataError

_EVERYTHING = "*"
"""Name of the only stream if there are no weights."""


class PromptSampler:
    """Endless sampler of ``prompts``.

    ``mixture`` applies after the last phase of ``curriculum``; if empty, each type's share of the prompts applies.
    Raises DataError, with the key and the existing types, if weights and prompts do not fit.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        shuffle: bool = True,
        mixture: Mapping[str, float] | None = None,
        curriculum: Sequence[CurriculumPhase] = (),
    ) -> None:
        num_by_type = Counter(prompt.type for prompt in prompts)
        check_mixtures(mixture or {}, curriculum, num_by_type)
        self._phase_ends = [phase.until_step for phase in curriculum]
        weighted = bool(mixture) or bool(curriculum)
        self._streams: dict[str, _EpochStream] = {}
        for name in sorted(num_by_type) if weighted else [_EVERYTHING]:
            members = [prompt for prompt in prompts if not weighted or prompt.type == name]
            # crc32 instead of hash(), which differs between processes.
            stream_seed = [seed, zlib.crc32(name.encode())] if weighted else [seed]
            self._streams[name] = _EpochStream(members, stream_seed, shuffle)
        last = mixture or (num_by_type if weighted else {_EVERYTHING: 1.0})
        self._shares = [_shares(weights) for weights in [*(phase.mixture for phase in curriculum), last]]
        self._phase = 0
        self._counts: Counter[str] = Counter()

    def draw(self, step: int = 0) -> Prompt:
        """Next prompt for training step ``step``, which determines the phase."""
        phase = sum(1 for end in self._phase_ends if step >= end)
        if phase != self._phase:
            self._phase, self._counts = phase, Counter()
        name = next_type(self._shares[phase], self._counts)
        self._counts[name] += 1
        return self._streams[name].draw()

    def state(self) -> dict[str, Any]:
        """The state as JSON-serializable values."""
        return {
            "phase": self._phase,
            "counts": dict(self._counts),
            "streams": {name: stream.state() for name, stream in self._streams.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. Raises DataError if it belongs to other data."""
        then = {name: stream["num_prompts"] for name, stream in state["streams"].items()}
        now = {name: stream.num_prompts for name, stream in self._streams.items()}
        if then != now:
            raise DataError(
                f"data.train_files: the checkpoint's order is over {_table(then)} prompts, but the files and weights "
                f"now give {_table(now)}; resume with the same data, or start a new run"
            )
        for name, stream in state["streams"].items():
            self._streams[name].go_to(stream["epoch"], stream["position"])
        self._phase, self._counts = state["phase"], Counter(state["counts"])


class _EpochStream:
    """Stream that yields every prompt once per epoch."""

    def __init__(self, prompts: Sequence[Prompt], seed: list[int], shuffle: bool) -> None:
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self.go_to(0, 0)

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    def draw(self) -> Prompt:
        if self._position == len(self._prompts):
            self.go_to(self._epoch + 1, 0)
        prompt = self._prompts[self._order[self._position]]
        self._position += 1
        return prompt

    def state(self) -> dict[str, int]:
        return {"epoch": self._epoch, "position": self._position, "num_prompts": len(self._prompts)}

    def go_to(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = np.arange(len(self._prompts))
        if self._shuffle:
            # Seeded per epoch, so that a resumed run rebuilds the order without replaying earlier epochs.
            np.random.default_rng([*self._seed, epoch]).shuffle(self._order)


def next_type(shares: Mapping[str, Fraction], counts: Mapping[str, int]) -> str:
    """Type of the next draw after ``counts``, so that no type is ever a whole draw away from its share.

    The j-th draw of a type with share p belongs between draws floor((j-1) / p) and ceil(j / p). Among the types
    whose next draw is allowed now, the one with the earliest deadline is taken. Like unit jobs on one machine, all
    meet their deadlines. (Taking the largest deficit, which is simpler, lets rare types fall behind by more than
    one draw.)
    """
    num_draws = sum(counts.get(name, 0) for name in shares)
    due = [
        (math.ceil((counts.get(name, 0) + 1) / share), name)
        for name, share in shares.items()
        if counts.get(name, 0) < share * (num_draws + 1)
    ]
    return min(due)[1]


def check_mixtures(
    mixture: Mapping[str, float], curriculum: Sequence[CurriculumPhase], num_by_type: Mapping[str, int]
) -> None:
    """Raise DataError with every problem of the weights, alone and against the types of the prompts."""
    problems = list(weight_problems(mixture, curriculum))
    for key, weights in _mixtures(mixture, curriculum):
        types = ", ".join(f"{name!r}" for name in sorted(num_by_type)) or "none"
        problems += [
            f"{key}: no prompt has the type {name!r}; the types in data.train_files are {types}"
            for name in weights
            if name not in num_by_type
        ]
        problems += [
            f"{key}: no weight for the {num_by_type[name]} prompts of type {name!r}; give it one (0 excludes the type)"
            for name in sorted(num_by_type)
            if name not in weights
        ]
    if problems:
        raise DataError("\n".join(problems))


def weight_problems(mixture: Mapping[str, float], curriculum: Sequence[CurriculumPhase]) -> Iterator[str]:
    """Yield the problems of a mixture's weights and a curriculum's steps that do not depend on the prompts."""
    for key, weights in _mixtures(mixture, curriculum):
        bad = {name: weight for name, weight in weights.items() if not (math.isfinite(weight) and weight >= 0)}
        yield from (f"{key}.{name}: expected a weight of 0 or more, got {weight}" for name, weight in bad.items())
        if not bad and not any(weights.values()):
            yield f"{key}: expected at least one weight above 0, got {dict(weights)}"
    before = 0
    for index, phase in enumerate(curriculum):
        if phase.until_step <= before:
            yield f"data.curriculum.{index}.until_step: expected more than {before}, got {phase.until_step}"
        before = phase.until_step


def _mixtures(
    mixture: Mapping[str, float], curriculum: Sequence[CurriculumPhase]
) -> Iterator[tuple[str, Mapping[str, float]]]:
    """(configuration key, weights); an empty ``mixture`` is skipped."""
    yield from ((f"data.curriculum.{index}.mixture", phase.mixture) for index, phase in enumerate(curriculum))
    if mixture:
        yield "data.mixture", mixture


def _shares(weights: Mapping[str, float]) -> dict[str, Fraction]:
    """Exact shares of the weights above 0, as written: 0.1 is one tenth. Fractions cannot drift."""
    exact = {name: Fraction(repr(weight)) for name, weight in weights.items() if weight > 0}
    total = sum(exact.values())
    return {name: weight / total for name, weight in sorted(exact.items())}


def _table(num_by_type: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(num_by_type.items()))
