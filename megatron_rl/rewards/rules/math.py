r"""Reward ``math``: 1.0 if the final answer of a response equals the ground truth, else 0.0.

Two numbers are compared exactly, in pure Python. Anything else (LaTeX, expressions, sets, intervals) goes to
math-verify, with its own time-outs off: they use signals, and the worker has a deadline and can be killed.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any, Literal

from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.registry import register
from megatron_rl.rewards.rules.answers import (
    MAX_ANSWER_CHARS,
    Number,
    boxed_answer,
    first_number,
    hash_answer,
    last_number,
    parse_number,
    phrase_answer,
)

Extract = Literal["auto", "last_number", "boxed", "exact"]

_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*[A-Za-z]")
_FUNCTION_NAMES = re.compile(r"(?:sqrt|frac|sin|cos|tan|log|exp|pi|infinity|inf|x|y|z)+", re.IGNORECASE)


def prepare(_options: Mapping[str, Any]) -> None:
    """Import math-verify, which takes about a second, before the first deadline runs."""
    import math_verify

    logging.getLogger(math_verify.__name__).setLevel(logging.ERROR)  # it warns that its time-outs are off


@register("math", prepare=prepare, range=(0.0, 1.0))
def score(response: str, answer: str, *, extract: Extract = "auto", separator: str = "") -> Score:
    r"""Compare the final answer of ``response`` with ``answer``.

    Args:
        extract: Where the final answer stands. ``boxed``: in the last ``\boxed{}``. ``last_number``: it is the last
            number. ``exact``: it is the whole response. ``auto``: the last ``\boxed{}``, else what follows the last
            ``####``, else the sentence after the last "answer is", else the last number.
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
    if not response.strip():
        return Score(0.0, "empty response")
    place, candidate = _find(response, extract)
    if candidate is None:
        if place == "last number" and truth is not None:
            return _compare_last_number(response, truth, separator)
        if place == "boxed":
            return Score(0.0, r"no closed \boxed{} in the response")
        candidate = response.strip()[-MAX_ANSWER_CHARS:]
    if not candidate:
        return Score(0.0, f"nothing after {place}")
    return _compare_anchored(place, candidate, answer, truth, separator)


def _final_part(answer: str) -> str:
    r"""The answer of a ground truth that is a whole solution ending in ``#### 42`` or holding ``\boxed{42}``."""
    return (hash_answer(answer) or boxed_answer(answer) or answer).strip()


def _find(response: str, extract: Extract) -> tuple[str, str | None]:
    """(place, text of the answer); None if the text has to be found by looking for numbers."""
    if extract == "last_number":
        return "last number", None
    if extract == "exact":
        return "response", response.strip()
    boxed = boxed_answer(response)
    if boxed is not None or extract == "boxed":
        return "boxed", boxed
    for place, text in (("####", hash_answer(response)), ("answer is", phrase_answer(response))):
        if text is not None:
            return place, text
    return "last number", None


def _compare_last_number(text: str, truth: Number, separator: str) -> Score:
    found = last_number(text, separator)
    if found is None:
        return Score(0.0, "no number in the response")
    number, spelling = found
    return Score(float(number.equals(truth)), f"last number: {spelling}")


def _compare_anchored(place: str, candidate: str, answer: str, truth: Number | None, separator: str) -> Score:
    """Compare the text of an answer: as a number, as words, then as an expression."""
    detail = f"{place}: {candidate[:200]}"
    if len(candidate) > MAX_ANSWER_CHARS:
        return Score(0.0, f"{place}: {len(candidate)} characters are no answer")
    if candidate == answer:
        return Score(1.0, detail)
    if truth is not None:
        if separator and separator in candidate:
            return _compare_last_number(candidate, truth, separator)
        number = parse_number(candidate)
        if number is None and place == "answer is" and "\\" not in candidate:
            found = first_number(candidate.rpartition("=")[2])  # "42, because ..."; "6 * 7 = 42"
            number = found[0] if found else None
        if number is not None:
            return Score(float(number.equals(truth)), detail)
    if _is_words(answer):
        # Compared as text: to math-verify, words are products of variables, and "silent" equals "listen".
        return Score(float(_plain_words(candidate) == _plain_words(answer)), detail)
    return _compare_symbolic(candidate, answer, detail)


def _is_words(text: str) -> bool:
    return bool(
        _WORDS.fullmatch(text)
        and any(len(word) > 2 and not _FUNCTION_NAMES.fullmatch(word) for word in re.findall("[A-Za-z]+", text))
    )


def _plain_words(text: str) -> str:
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r"\1", text)
    return " ".join(text.strip(" .!$*`\"'").casefold().split())


def _compare_symbolic(candidate: str, answer: str, detail: str) -> Score:
    from math_verify import parse, verify

    def read(text: str) -> list:
        anchored = text if "$" in text or "\\boxed" in text else f"\\boxed{{{text}}}"
        try:
            return parse(anchored, parsing_timeout=None, raise_on_error=True)
        except MemoryError:
            raise
        except Exception:  # on text that is no mathematics, math-verify raises many kinds
            return []

    truth = read(answer)
    if not truth:
        return Score(None, detail, f"the ground truth {answer[:80]!r} is neither a number nor an expression")
    return Score(float(verify(truth, read(candidate), timeout_seconds=None)), detail)
