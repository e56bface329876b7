r"""Reward ``math``: 1.0 if the final answer of a response equals the ground truth, else 0.0.

Two numbers are compared exactly, in pure Python. Other answers are parsed as mathematics (``parse_answer.py``) and compared
by meaning (``compare_answers.py``), within a CPU time limit: an answer that is too large or too slow to compare is wrong.
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
    answer_line,
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
from megatron_rl.graders.answers.units import Unit, leading_unit, split_unit, unit_behind
from megatron_rl.rewards.registry import register

Extract = Literal["auto", "last_number", "boxed", "exact", "answer_line"]

_CPU_LIMIT_S = 2.0
"""CPU time limit for parsing and comparing one answer; below any sensible ``reward.timeout_s``."""
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*[A-Za-z]")
_FUNCTION_NAMES = re.compile(r"(?:sqrt|frac|sin|cos|tan|log|ln|exp|pi|infinity|inf|x|y|z|and|or)+", re.IGNORECASE)
_DECIMAL_COMMA = re.compile(r"([+-]?(?:0|[0-9]*[1-9][0-9]{3,}|[1-9][0-9]*(?=,(?![0-9]{3}$)))),([0-9]+)")
"""Matches numbers with a decimal comma, such as 1000,99 and 0,5, but not 1,234, which is a thousand. Matches may also
be lists."""
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
"""Texts that warm up the parser: it extends its grammar on use, and the first text of each kind takes 0.1 s and more.
"""


class _TooSlow(BaseException):
    """Raised at the CPU limit. Not an Exception, because libraries in the call stack catch those."""


def prepare(_options: Mapping[str, Any]) -> None:
    """Import sympy and warm up the parser, which takes a few seconds, before the first deadline starts."""
    from megatron_rl.graders.answers.compare_answers import same
    from megatron_rl.graders.answers.parse_answer import read

    for text in _WARM_UP:
        same(read(text), read("1, 2"))


@register("math", prepare=prepare, range=(0.0, 1.0))
def score(response: str, answer: str, *, extract: Extract = "auto", separator: str = "") -> Score:
    r"""Compare the final answer of ``response`` with ``answer``.

    Args:
        extract: Location of the final answer, after the thought if there is one. ``boxed``: the last ``\boxed{}``, or the
            last few if they are adjacent. ``answer_line``: the last line, if it has the form ``Answer: 42``.
            ``last_number``: the last number. ``exact``: the whole response. ``auto``:
            the last "answer is" or ``\boxed{}``, whichever comes last, else the text after the last ``####``, else the
            last formula or number; a sentence that hedges or denies is not an answer.
        separator: Separates the numbers of an answer that lists several; the last number counts. With "," commas are
            not thousands separators: 122,134 is 134.

    Returns:
        Value 1.0 or 0.0, with the extracted text as detail; no value if ``answer`` itself cannot be parsed. If ``answer`` is
        a whole solution, the text after its ``####``, or in its ``\boxed{}``, is the ground truth.
    """
    answer = _final_part(answer)
    if not answer:
        return Score(None, error="the ground truth is empty")
    truth = parse_number(answer)
    if extract == "last_number" and truth is None:
        return Score(None, error=f"the ground truth {answer[:80]!r} is not a number, which extract=last_number needs")
    if truth is None and not _is_words(answer) and not _is_readable(answer):
        return Score(None, error=f"the ground truth {answer[:80]!r} is neither a number nor an expression")
    solution = solution_of(response)
    if solution is None:
        return Score(0.0, "the thought does not end")
    if not solution.strip():
        return Score(0.0, "empty response")
    return _AnswerComparison(answer, truth, separator).score(solution, extract)


def _final_part(answer: str) -> str:
    r"""Final answer of a ground truth, which may be a whole solution that ends in ``#### 42`` or contains ``\boxed{42}``."""
    final = hash_answer(answer) or boxed_answer(answer)
    if not final and (phrase := phrase_answer(answer)):
        formula = last_formula(phrase)
        final = formula[0] if formula else phrase
    return (final or open_box(answer)).strip()


class _AnswerComparison:
    """Compares responses with one ground truth."""

    def __init__(self, answer: str, truth: ParsedNumber | None, separator: str) -> None:
        self._answer = answer
        self._truth = truth
        self._separator = separator
        self._bare, self._unit = split_unit(answer)

    def score(self, solution: str, extract: Extract) -> Score:
        if extract == "last_number":
            return self._last_number(solution)
        if extract == "exact":
            return self._anchored("response", solution.strip())
        if extract == "answer_line":
            line = answer_line(solution)
            return self._anchored("answer line", line) if line is not None else Score(0.0, "the last line is not 'Answer: ...'")
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
            # After a box, "the answer is" counts only before a number, because the text may continue to discuss the answer.
            if phrase and "\\boxed" not in phrase and (number := _committed_number(phrase)) and self._truth is not None:
                return Score(float(self._same_number(number, phrase)), f"answer is: {phrase[:200]}")
            return self._anchored("boxed", boxed)
        hashed = hash_answer(solution)
        if hashed is not None:
            return self._anchored("####", hashed)
        if phrase is not None:
            return self._phrase(phrase)
        return self._last(solution)

    def _last_number(self, text: str) -> Score:
        last = last_number(text, self._separator)
        if last is None or self._truth is None:
            return Score(0.0, "no number in the response")
        return Score(float(self._same_number(last[0], text)), f"last number: {last[1]}")

    def _anchored(self, place: str, candidate: str) -> Score:
        """Compare the text of an answer: by its unit, as a number, as words, then as an expression."""
        bare, unit = split_unit(candidate) if self._unit else (candidate, None)
        if self._unit and unit:
            return Score(float(self._same_measure(bare, unit)), f"{place}: {candidate[:200]}")
        if not candidate:
            return Score(0.0, f"nothing after {place}")
        detail = f"{place}: {candidate[:200]}"
        if len(candidate) > MAX_ANSWER_CHARS:
            return Score(0.0, f"{place}: {len(candidate)} characters are not an answer")
        if candidate == self._answer:
            return Score(1.0, detail)
        if self._separator and self._separator in candidate and self._truth is not None:
            return self._last_number(candidate)
        equal = self._as_numbers(candidate)
        if equal is None and (_is_words(self._answer) or _is_words(candidate)):
            # Compare words as text: as products of variables, "silent" would equal "listen".
            equal = _plain_words(candidate) == _plain_words(self._answer)
        if equal is None:
            equal = _means_the_same(self._answer, candidate)
        return Score(float(equal), detail)

    def _as_numbers(self, candidate: str) -> bool | None:
        """Compare both as plain numbers; None if one of them is more than a number."""
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

    def _same_measure(self, bare: str, unit: Unit) -> bool:
        assert self._unit is not None
        if unit == self._unit:
            return _AnswerComparison(self._bare, parse_number(self._bare), "")._anchored("", bare).value == 1.0
        measures = [f"({number}) \\cdot {size}" for number, size in ((self._bare, self._unit.size), (bare, unit.size))]
        return unit.dimensions == self._unit.dimensions and _means_the_same(*measures)

    def _same_number(self, number: ParsedNumber, text: str) -> bool:
        """True if ``number``, the last one of ``text``, is the truth in its unit."""
        unit = unit_behind(text) if self._unit else None
        if unit is not None and unit != self._unit:
            return self._same_measure(str(number.value), unit)
        return self._truth is not None and number.equals(self._truth)

    def _phrase(self, sentence: str) -> Score:
        """Compare the text after "the answer is"."""
        if not sentence:
            return Score(0.0, "answer is: hedged or denied")
        detail = f"answer is: {sentence[:200]}"
        if self._separator and self._separator in sentence and self._truth is not None:
            return self._last_number(sentence)
        head = strip_explanation(sentence)
        whole = self._anchored("answer is", head)
        has_unit = self._unit is not None and split_unit(head)[1] is not None
        if whole.value == 1.0 or has_unit or (self._truth is not None and _committed_number(sentence) is None):
            return Score(whole.value, detail)
        formula = last_formula(head)
        if formula is not None and re.search("[0-9]", head[formula[2] :]):
            formula = None  # for example "the volume of $ABCD$ is 120"
        if formula is not None and not hedged(head[: formula[1]] + head[formula[2] :]):
            return Score(self._anchored("answer is", formula[0]).value, detail)
        number = _committed_number(sentence)
        return Score(float(number is not None and self._same_number(number, sentence)), detail)

    def _last(self, solution: str) -> Score:
        """Compare the last formula or number of a text without any marker."""
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
    """The percent sign or the known unit that follows a formula, else ""."""
    match = re.match(r"\s*(?:\\?%|percent\b|pct\b)", text)
    return "%" if match else leading_unit(text)


def _committed_number(sentence: str) -> ParsedNumber | None:
    """The only number of a sentence without hedges and explanations; of "6 * 7 = 42", the result."""
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
    """True if both texts have the same mathematical meaning; False if one cannot be parsed or takes too long."""
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
    """Raise ``_TooSlow`` after ``_CPU_LIMIT_S`` of this process's CPU time; no limit outside the main thread."""
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
