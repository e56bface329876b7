"""Labels the lines of a program by whether they can still be completed to a correct program (arXiv 2410.17621). Pure.

A prefix of m lines is *recoverable* if one of K sampled completions passes all tests. Recoverability can only be lost
as m grows, so a binary search finds the first bad line with log2(lines) queries instead of one per line. Labels are +1
before that line, -1 from it on, and 0 on neutral lines, which the search skips.
"""

from collections.abc import Sequence

from megatron_rl.data.code_lines import CodeLine

GOOD, BAD, NEUTRAL = 1, -1, 0


class LineSearch:
    """Interactive binary search: test a prefix of ``question`` lines, pass the result to ``answer``, until ``question``
    is None.

    Lines count from 1. ``first_bad`` is num_lines + 1 if no line is bad; a program that failed its tests has a bad
    line.
    """

    def __init__(self, num_lines: int, *, passes: bool) -> None:
        if num_lines < 0:
            raise ValueError(f"num_lines must be 0 or more, got {num_lines}")
        self._low, self._high = (num_lines + 1, num_lines + 1) if passes or not num_lines else (1, num_lines)

    @property
    def question(self) -> int | None:
        """Number of lines of the next prefix to test; None once the search is finished."""
        return (self._low + self._high) // 2 if self._low < self._high else None

    def answer(self, recoverable: bool) -> None:
        tested = self.question
        if tested is None:
            raise ValueError("the search is over: no question is open")
        if recoverable:
            self._low = tested + 1
        else:
            self._high = tested

    @property
    def first_bad(self) -> int:
        if self.question is not None:
            raise ValueError(f"the search is not over: is the prefix of {self.question} lines recoverable?")
        return self._low


def scored_lines(lines: Sequence[CodeLine]) -> list[CodeLine]:
    """Lines that the search covers: all lines that are not neutral."""
    return [line for line in lines if not line.neutral]


def line_labels(lines: Sequence[CodeLine], first_bad: int) -> list[int]:
    """One label per line; ``first_bad`` counts the lines that are not neutral, from 1."""
    labels, number = [], 0
    for line in lines:
        number += not line.neutral
        labels.append(NEUTRAL if line.neutral else GOOD if number < first_bad else BAD)
    return labels
