r"""Reward ``math``: 1.0 if the final answer of a response equals the ground truth, else 0.0.

Two numbers are compared exactly, in pure Python. Anything else is read as mathematics (``parse_answer.py``) and compared by
what it means (``compare_answers.py``), within a limit of CPU time: what a response makes too large or too slow is wrong.
"""

import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from megatron_rl.data.trajectory import Score
from megatron_rl.graders.answers.final_answer import (
    MAX_ANSWER_CHARS,
    boxed_answer,
    hash_answer,
    hedged,
    hedged_near,
    last_formula,
    open_box,
    phrase_answer,
    solution_of,
    strip_explanation,
)
from megatron_rl.graders.answers.number_parsing import ParsedNumber, all_numbers, last_number, parse_number
from megatron_rl.rewards.registry import register

Extract = Literal["auto", "last_number", "boxed", "exact"]

_CPU_LIMIT_S = 2.0
"""For reading and comparing one answer, below any sensible ``reward.timeout_s``."""
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*[A-Za-z]")
_FUNCTION_NAMES = re.compile(r"(?:sqrt|frac|sin|cos|tan|log|ln|exp|pi|infinity|inf|x|y|z|and|or)+", re.IGNORECASE)
_DECIMAL_COMMA = re.compile(r"([+-]?(?:0|[0-9]*[1-9][0-9]{3,}|[1-9][0-9]*(?=,(?![0-9]{3}$)))),([0-9]+)")
"""1000,99 and 0,5, where 1,234 is a thousand; they may be lists as well."""
_TEXT = re.compile(r"\\(?:text|textbf|textnormal|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")


_WARM_UP = (
    r"\frac{\sqrt{3}}{2} + x^2 - 2x",
    r"3\sin(x) \cdot \pi^{n+1}",
    r"\frac{-5 + 2\sqrt{13}}{6}, e^{-x} \log_2 3",
    r"x^2 + y^2 = (x - 1)(2y + 3)",
    r"1 < x \le 2",
    r"(-\infty, \frac{1}{2}) \cup [3x, 2!]",
    r"\begin{pmatrix} 1 & 2 \\ 3 & x \end{pmatrix}",
)
"""The parser learns its grammar from what it parses: the first texts of each kind take a tenth of a second and more."""


class _TooSlow(BaseException):
    """No Exception: the libraries in between catch those."""


def prepare(_options: Mapping[str, Any]) -> None:
    """Import sympy and warm up the parser, which takes a few seconds, before the first deadline runs."""
    from megatron_rl.graders.answers.compare_answers import same
    from megatron_rl.graders.answers.parse_answer import read

    for text in _WARM_UP:
        same(read(text), read("1, 2"))


@register("math", prepare=prepare, range=(0.0, 1.0))
def score(response: str, answer: str, *, extract: Extract = "auto", separator: str = "") -> Score:
    r"""Compare the final answer of ``response`` with ``answer``.

    Args:
        extract: Where the final answer stands, behind the thought if there is one. ``boxed``: in the last ``\boxed{}``,
            or the last few if they stand together. ``last_number``: it is the last number. ``exact``: it is the whole
            response. ``auto``: the last "answer is" or ``\boxed{}``, whichever is last, else what follows the last
            ``####``, else the last formula or number; a sentence that hedges or denies is no answer.
        separator: Stands between the numbers of an answer that lists several, of which the last counts. With ","
            commas are no thousands separators: 122,134 is 134.

    Returns:
        Value 1.0 or 0.0 and, as detail, what was extracted; no value if ``answer`` itself cannot be compared with. An
        ``answer`` may be a whole solution: then what follows its ``####``, or its ``\boxed{}``, is the truth.
    """
    answer = _final_part(answer)
    if not answer:
        return Score(None, error="the ground truth is empty")
    truth = parse_number(answer)
    if extract == "last_number" and truth is None:
        return Score(None, error=f"the ground truth {answer[:80]!r} is no number, as extract=last_number needs")
    if truth is None and not _is_words(answer) and not _is_readable(answer):
        return Score(None, error=f"the ground truth {answer[:80]!r} is neither a number nor an expression")
    solution = solution_of(response)
    if solution is None:
        return Score(0.0, "the thought does not end")
    if not solution.strip():
        return Score(0.0, "empty response")
    return _AnswerComparison(answer, truth, separator).score(solution, extract)


def _final_part(answer: str) -> str:
    r"""The answer of a ground truth that is a whole solution ending in ``#### 42`` or holding ``\boxed{42}``."""
    found = hash_answer(answer) or boxed_answer(answer)
    if not found and (phrase := phrase_answer(answer)):
        formula = last_formula(phrase)
        found = formula[0] if formula else phrase
    return (found or open_box(answer)).strip()


class _AnswerComparison:
    """One ground truth and what is compared with it."""

    def __init__(self, answer: str, truth: ParsedNumber | None, separator: str) -> None:
        self._answer = answer
        self._truth = truth
        self._separator = separator

    def score(self, solution: str, extract: Extract) -> Score:
        if extract == "last_number":
            return self._last_number(solution)
        if extract == "exact":
            return self._anchored("response", solution.strip())
        boxed = boxed_answer(solution)
        if extract == "boxed":
            return (
                self._anchored("boxed", boxed)
                if boxed is not None
                else Score(0.0, r"no closed \boxed{} in the response")
            )
        behind = solution[solution.rfind("\\boxed") :] if boxed is not None else solution
        phrase = phrase_answer(behind)
        if boxed is not None:
            # Behind a box, "the answer is" counts only where a number follows: it may go on about the answer.
            if phrase and "\\boxed" not in phrase and (number := _committed_number(phrase)) and self._truth is not None:
                return Score(float(number.equals(self._truth)), f"answer is: {phrase[:200]}")
            return self._anchored("boxed", boxed)
        hashed = hash_answer(solution)
        if hashed is not None:
            return self._anchored("####", hashed)
        if phrase is not None:
            return self._phrase(phrase)
        return self._last(solution)

    def _last_number(self, text: str) -> Score:
        found = last_number(text, self._separator)
        if found is None or self._truth is None:
            return Score(0.0, "no number in the response")
        return Score(float(found[0].equals(self._truth)), f"last number: {found[1]}")

    def _anchored(self, place: str, candidate: str) -> Score:
        """Compare the text of an answer: as a number, as words, then as an expression."""
        if not candidate:
            return Score(0.0, f"nothing after {place}")
        detail = f"{place}: {candidate[:200]}"
        if len(candidate) > MAX_ANSWER_CHARS:
            return Score(0.0, f"{place}: {len(candidate)} characters are no answer")
        if candidate == self._answer:
            return Score(1.0, detail)
        if self._separator and self._separator in candidate and self._truth is not None:
            return self._last_number(candidate)
        equal = self._as_numbers(candidate)
        if equal is None and (_is_words(self._answer) or _is_words(candidate)):
            # Compared as text: as mathematics, words are products of variables, and "silent" equals "listen".
            equal = _plain_words(candidate) == _plain_words(self._answer)
        if equal is None:
            equal = _means_the_same(self._answer, candidate)
        return Score(float(equal), detail)

    def _as_numbers(self, candidate: str) -> bool | None:
        """Whether both are plain numbers and equal; None if that needs more than numbers."""
        if "=" in candidate and "=" in self._answer:
            return None  # x = 1 is not y = 1
        comma = any(_DECIMAL_COMMA.fullmatch(text) for text in (candidate, self._answer))
        texts = [_DECIMAL_COMMA.sub(r"\1.\2", text) if comma else text for text in (candidate, self._answer)]
        number, truth = (parse_number(text) for text in texts)
        if number is None or truth is None:
            return None
        if number.equals(truth):
            return True
        return None if comma or number.decimals or truth.decimals else False

    def _phrase(self, sentence: str) -> Score:
        """Compare what follows "the answer is"."""
        if not sentence:
            return Score(0.0, "answer is: hedged or denied")
        detail = f"answer is: {sentence[:200]}"
        if self._separator and self._separator in sentence and self._truth is not None:
            return self._last_number(sentence)
        head = strip_explanation(sentence)
        whole = self._anchored("answer is", head)
        if whole.value == 1.0 or (self._truth is not None and _committed_number(sentence) is None):
            return Score(whole.value, detail)
        formula = last_formula(head)
        if formula is not None and re.search("[0-9]", head[formula[2] :]):
            formula = None  # the volume of $ABCD$ is 120
        if formula is not None and not hedged(head[: formula[1]] + head[formula[2] :]):
            return Score(self._anchored("answer is", formula[0]).value, detail)
        number = _committed_number(sentence)
        return Score(float(self._truth is not None and number is not None and number.equals(self._truth)), detail)

    def _last(self, solution: str) -> Score:
        """Compare the last formula or number of a text without any mark."""
        text = solution.strip()
        if len(text) <= MAX_ANSWER_CHARS:
            whole = self._anchored("response", text.rstrip("."))
            if whole.value == 1.0 and not (
                self._truth is None and hedged(_words_of(text)) and not _is_words(self._answer)
            ):
                return whole
        formula = last_formula(text)
        number = last_number(text, self._separator)
        if formula is not None and not re.search("[0-9]", text[formula[2] :]):
            if hedged_near(text[: formula[1]], formula[1]) or hedged_near(text[formula[2] :], 0):
                return Score(0.0, f"last formula, hedged: {formula[0][:200]}")
            return self._anchored("last formula", formula[0] + _unit_behind(text[formula[2] :]))
        if self._truth is None:
            return Score(0.0, f"no final answer: {text[-200:]}")
        if number is not None and hedged_near(text, max(text.rfind(digit) for digit in "0123456789")):
            return Score(0.0, f"last number, hedged: {number[1]}")
        return self._last_number(text)


def _unit_behind(text: str) -> str:
    """The percent sign that stands outside a formula."""
    match = re.match(r"\s*(?:\\?%|percent\b|pct\b)", text)
    return "%" if match else ""


def _committed_number(sentence: str) -> ParsedNumber | None:
    """The only number of a sentence without hedges, explanations aside; of "6 * 7 = 42" what it comes to."""
    head = strip_explanation(sentence)
    first, comma, rest = head.partition(", ")
    if comma and not re.match(r"(?i)[-+$\\(]*[0-9]|(?:or|and|but)\b|\\|\$", rest.strip()):
        head = first
    if hedged(f"{head} {rest}"):
        return None
    numbers = {number.value: number for number in all_numbers(head.rpartition("=")[2])}
    return numbers.popitem()[1] if len(numbers) == 1 else None


def _words_of(text: str) -> str:
    return re.sub(r"\\[A-Za-z]+", " ", text)


def _is_words(text: str) -> bool:
    text = _TEXT.sub(r"\1", text).strip(" .$\"'`*()")
    return bool(
        _WORDS.fullmatch(text)
        and any(len(word) > 2 and not _FUNCTION_NAMES.fullmatch(word) for word in re.findall("[A-Za-z]+", text))
    )


def _plain_words(text: str) -> str:
    return " ".join(_TEXT.sub(r"\1", text).strip(" .!$*`\"'()").casefold().split())


# --------------------------------------------------------------------------------------------------------- mathematics


def _is_readable(answer: str) -> bool:
    from megatron_rl.graders.answers.expressions import ParseError
    from megatron_rl.graders.answers.parse_answer import read

    try:
        with _cpu_limit():
            read(answer)
    except (ParseError, RecursionError, _TooSlow):
        return bool(re.search(r"[A-Za-z]", answer)) and _plain_words(answer).isalnum()
    return True


def _means_the_same(answer: str, candidate: str) -> bool:
    """Whether both are the same mathematics; what cannot be read or takes too long is not."""
    from megatron_rl.graders.answers.compare_answers import same
    from megatron_rl.graders.answers.expressions import ParseError
    from megatron_rl.graders.answers.parse_answer import read

    if "".join(answer.split()) == "".join(candidate.split()):
        return True
    try:
        with _cpu_limit():
            return same(read(answer), read(candidate))
    except (ParseError, RecursionError, _TooSlow):
        return False


@contextmanager
def _cpu_limit() -> Iterator[None]:
    """Raise ``_TooSlow`` after ``_CPU_LIMIT_S`` of this process's own time; outside a main thread there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: Any) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _CPU_LIMIT_S, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
