"""Grading throughput of the reward ``math`` with warm workers, and what one hanging answer costs the others.

Used by bench_algorithms.py. Stands alone because the workers import it: a reward's module should be light.
"""

import time
from dataclasses import dataclass

from rich.table import Table

from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.rules import math as math_reward
from megatron_rl.rewards.workers.calls import RunnerSettings
from megatron_rl.rewards.workers.processes import RewardRunner

HANG = "hang"
TIMEOUT_S = 5.0
NUM_WARM_ITEMS = 256
SHORT_FORMS = (
    "3 + 4 makes {other}. The answer is {given}.",
    "So we get \\boxed{{{given}}}.",
    "Adding both, {other} remain.\n#### {given}",
    "First there are {other}, hence {given}",
)


@dataclass(frozen=True)
class Graded:
    """Items and the scores that they deserve."""

    items: list[tuple[str, str]]
    expected: list[float]

    def check(self, scores: list[Score]) -> None:
        """Refuse to time a grader that is wrong."""
        for item, score, expected in zip(self.items, scores, self.expected, strict=True):
            if score.value != expected:
                raise RuntimeError(f"{item}: expected the score {expected}, got {score}")


def math_or_hang(response: str, answer: str) -> Score:
    """The reward ``math``, which never ends on one response."""
    while response == HANG:
        pass
    return math_reward.score(response, answer)


def short_answers(count: int) -> Graded:
    """Plain numbers in the spellings that models use; every second one is right."""
    items = [
        (SHORT_FORMS[index % len(SHORT_FORMS)].format(other=index % 97, given=index + index % 2), str(index))
        for index in range(count)
    ]
    return Graded(items, [float(index % 2 == 0) for index in range(count)])


def expressions(count: int) -> Graded:
    """Answers that need a symbolic comparison; all are right."""
    items = [
        (f"Therefore \\boxed{{\\frac{{{2 * over - 2}}}{{{2 * over}}}x}}.", f"x\\cdot\\frac{{{over - 1}}}{{{over}}}")
        for over in range(2, count + 2)
    ]
    return Graded(items, [1.0] * count)


def measure_grading(num_answers: int, num_workers: int, repeats: int) -> Table:
    """Best of ``repeats``, but for hanging answers, of which each costs its deadline."""
    table = Table(title=f"grading, {num_workers} workers, best of {repeats}")
    for column in ("answers", "number", "seconds", "answers per second"):
        table.add_column(column, justify="left" if column == "answers" else "right")

    def add(name: str, number: int, seconds: float) -> None:
        table.add_row(name, f"{number}", f"{seconds:.3f}", f"{number / seconds:,.0f}")

    short, symbolic = short_answers(num_answers), expressions(num_answers // 20)
    with RewardRunner("math", RunnerSettings(num_workers=num_workers, timeout_s=TIMEOUT_S)) as runner:
        for name, graded in (("short, plain numbers", short), ("LaTeX expressions", symbolic)):
            runner.submit(graded.items[:NUM_WARM_ITEMS]).result()
            add(name, len(graded.items), min(seconds_to_score(runner, graded) for _ in range(repeats)))

    # The hanging answer keeps one worker to itself until its deadline: with one more, the others have as many as before.
    with RewardRunner(
        f"{__name__}:math_or_hang", RunnerSettings(num_workers=num_workers + 1, timeout_s=TIMEOUT_S)
    ) as runner:
        runner.submit(short.items[:NUM_WARM_ITEMS]).result()
        undisturbed_s = min(seconds_to_score(runner, short) for _ in range(repeats))
        others_s, hanging_s = seconds_next_to_a_hanging_answer(runner, short)
    add("short, with one worker more", num_answers, undisturbed_s)
    add("the same next to one that hangs", num_answers, others_s)
    table.caption = f"the hanging answer itself was given up after {hanging_s:.1f} s; its deadline is {TIMEOUT_S:g} s"
    return table


def seconds_to_score(runner: RewardRunner, graded: Graded) -> float:
    started_at = time.perf_counter()
    scores = runner.submit(graded.items).result()
    seconds = time.perf_counter() - started_at
    graded.check(scores)
    return seconds


def seconds_next_to_a_hanging_answer(runner: RewardRunner, graded: Graded) -> tuple[float, float]:
    """(seconds until all of ``graded`` are scored, seconds until a hanging one in their midst is given up)."""
    middle = len(graded.items) // 2
    started_at = time.perf_counter()
    before = runner.submit(graded.items[:middle])
    hanging = runner.submit([(HANG, "1")])
    after = runner.submit(graded.items[middle:])
    graded.check(before.result() + after.result())
    others_s = time.perf_counter() - started_at
    if hanging.done() or hanging.result()[0].value is not None:
        raise RuntimeError("expected the hanging answer to outlast the others and to go unscored")
    return others_s, time.perf_counter() - started_at
