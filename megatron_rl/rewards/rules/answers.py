r"""Reads final answers: where they are in a response, and which number they say.

Plain numbers are read here, exactly, as fractions: integers, decimals, thousands separators, signs, currencies,
percent, fractions, mixed numbers, powers of ten, LaTeX spellings of all these, units behind them. Everything else is
for the symbolic comparison.

Invariants: every function takes time linear in the text, whatever the text; numbers longer than ``MAX_NUMBER_CHARS``
are not numbers; only ASCII digits are digits.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_NUMBER_CHARS = 256
MAX_ANSWER_CHARS = 1000
"""An anchored answer longer than this is no answer."""

_MARGIN_CHARS = 32
"""How far left of a number its meaning may be decided: by a sign, a caret, the top of a LaTeX fraction."""
_STEP_CHARS = MAX_NUMBER_CHARS + 2 * _MARGIN_CHARS

_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_MATH_WORDS = frozenset(
    "pi sqrt log ln exp sin cos tan cot sec csc arcsin arccos arctan inf infty infinity mod and or to half".split()
)
"""Words behind a number that make it something else than a number with a unit."""

_NUMBER = re.compile(
    r"""
    (?= [-+$.0-9] )                                            # most positions fail here, which is quick
    (?<![A-Za-z0-9_.^]) (?<!\^-) (?<![\^_]\{) (?<!\^\{-)       # not inside a word, an exponent or an index
    (?P<in_date> (?<= [0-9]/ ) )?                              # in 12/25/2020, no two parts are a fraction
    (?P<sign> (?<![0-9A-Za-z)\]}%]) [-+] )? \$?                # 5-3 is two numbers, no sign; -$5
    (?P<sign_after> (?<=\$) [-+] )?                            # $-5
    (?> (?P<mixed> [0-9]+ ) [ ]+ (?= [0-9]+/[0-9]+ (?![0-9./]) ) )?
    (?> (?P<whole> [0-9]{1,3} (?:,[0-9]{3})+ (?![0-9]) | [0-9]+ )? (?P<decimals> \.[0-9]+ )? )
    (?<= [0-9] )
    (?: [eE] (?P<exponent> [-+]?[0-9]{1,3} ) (?![0-9A-Za-z]) )?
    (?: \s* (?: \\times | \\cdot | [\u00d7*x] ) \s* 10 \s* \^ \s* \{? (?P<power> [-+]?[0-9]{1,3} ) (?![0-9]) \}? )?
    (?(in_date) | (?: [ ]?/[ ]? (?P<denominator> [0-9]+ ) (?! [0-9]*/ | \.?[0-9] ) )? )
    (?! \s* \^ )                                               # 10^5 is not 10
    (?P<percent> \s?% )?
    (?: \s+ (?P<scale> thousand | million | billion | trillion ) \b )?
    """,
    re.VERBOSE,
)
_INTEGER = re.compile(r"-?[0-9]+")
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
_ANSWER_PHRASE = re.compile(r"(?i)\banswer\s*(?:is|[:=])[ \t:=]*")
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")
_LATEX_FRACTION = re.compile(r"([0-9]?)\s*\\[dt]?frac\s*(?:\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}|([0-9])([0-9]))")
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_SPELLINGS = (
    ("\u2212", "-"),
    (r"\$", "$"),
    ("€", "$"),
    ("£", "$"),
    ("¥", "$"),
    (r"\%", "%"),
    ("{,}", ","),
    (r"\,", ""),
    (r"\!", ""),
    (r"\;", " "),
    (r"\ ", " "),
    ("~", " "),
    (r"\left", ""),
    (r"\right", ""),
    (r"^\circ", "°"),
    (r"^{\circ}", "°"),
)


@dataclass(frozen=True)
class Number:
    """A number as read: ``50%`` has value 50 and is a percentage."""

    value: Fraction
    percent: bool = False

    def equals(self, other: "Number") -> bool:
        """Exact equality. 50% equals 50% and, where the other side has no sign, both 50 and 0.5."""
        if self.value == other.value:
            return True
        if self.percent == other.percent:
            return False
        percentage, plain = (self, other) if self.percent else (other, self)
        return percentage.value / 100 == plain.value

    def __str__(self) -> str:
        return f"{self.value}{'%' if self.percent else ''}"


# ---------------------------------------------------------------------------------------------------- where it stands


def boxed_answer(text: str) -> str | None:
    r"""The content of the last closed ``\boxed{...}``; of the inner one if they nest."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    openings: list[int | None] = []  # for each open brace: where a box's content starts, or None
    best: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "{":
            openings.append(None)
        elif token.startswith(("\\boxed", "\\fbox")):
            openings.append(match.end())
        elif token == "}" and openings:
            start = openings.pop()
            if start is not None and (best is None or start > best[0]):
                best = (start, match.start())
    return text[best[0] : best[1]].strip() if best else None


def hash_answer(text: str) -> str | None:
    """What follows the last ``####``, to the end of its line (the GSM8K form)."""
    start = text.rfind("####")
    return text[start + 4 :].strip().partition("\n")[0].strip() if start >= 0 else None


def phrase_answer(text: str) -> str | None:
    """What follows the last "answer is" or "answer:", to the end of its sentence."""
    start = None
    for match in _ANSWER_PHRASE.finditer(text):
        start = match.end()
    if start is None:
        return None
    tail = text[start : start + MAX_ANSWER_CHARS + 1].lstrip()
    end = _SENTENCE_END.search(tail)
    return (tail[: end.start()] if end else tail).strip(" *_`") or None


# -------------------------------------------------------------------------------------------------- what number it is


def _respell(text: str) -> str:
    """Rewrite LaTeX and Unicode spellings that numbers use."""
    for spelling, plain in _SPELLINGS:
        text = text.replace(spelling, plain)
    return _LATEX_FRACTION.sub(_plain_fraction, text)


def _plain_fraction(match: re.Match[str]) -> str:
    whole, top, bottom, short_top, short_bottom = match.groups()
    return f"{whole}{' ' if whole else ''}{top or short_top}/{bottom or short_bottom}"


def _to_number(match: re.Match[str]) -> Number | None:
    part = match.groupdict()
    value = Fraction(int((part["whole"] or "0").replace(",", "")))
    if part["decimals"]:
        value += Fraction(int(part["decimals"][1:]), 10 ** (len(part["decimals"]) - 1))
    if part["exponent"] or part["power"]:
        value *= Fraction(10) ** int(part["exponent"] or part["power"])
    if part["denominator"]:
        if int(part["denominator"]) == 0:
            return None
        value /= int(part["denominator"])
    value = (value + int(part["mixed"] or 0)) * _SCALES.get(part["scale"] or "", 1)
    if "-" in (part["sign"], part["sign_after"]):
        value = -value
    return Number(value, percent=bool(part["percent"]))


def parse_number(text: str) -> Number | None:
    """The number that ``text`` is as a whole, units and "x =" aside; None if it is anything else."""
    if len(text) > MAX_NUMBER_CHARS:
        return None
    if _INTEGER.fullmatch(text):
        return Number(Fraction(int(text)))
    text = _LATEX_TEXT.sub(r" (\1)", _respell(text)).strip()
    for left, right in ((r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"), ("$", "$")):
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
            text = text[len(left) : -len(right)].strip()
    text = text.strip("*_` \t\r\n")
    if text.count("=") == 1:
        text = text.partition("=")[2].strip()
    match = _NUMBER.match(text)
    if match is None or not _is_unit(text[match.end() :]):
        return None
    return _to_number(match)


def _is_unit(tail: str) -> bool:
    """Whether what follows a number leaves it that number: nothing, punctuation or a unit.

    A single letter is no unit (5x is not 5) unless LaTeX marks it as text, which arrives here in parentheses.
    """
    tail = tail.strip(" \t\r\n.!$*_`")
    if not tail:
        return True
    tail = re.sub(r"(?:\^\{?[23]\}?|[²³])$", "", tail)
    if re.fullmatch(r"\([^()0-9]*\)", tail):
        return _MATH_WORDS.isdisjoint(tail.strip("()").lower().split())
    if not re.fullmatch(r"[A-Za-z°][A-Za-z°'\-/. ]*", tail):
        return False
    words = re.findall(r"[A-Za-z]+|°", tail)
    first = words[0]
    return (len(first) > 1 or first == "°") and _MATH_WORDS.isdisjoint(word.lower() for word in words)


def last_number(text: str, separator: str = "") -> tuple[Number, str] | None:
    """The last number in ``text``, and how it is written.

    Args:
        separator: Stands between numbers; with "," as separator, 122,134 is the numbers 122 and 134.
    """
    if separator:
        text = text.replace(separator, "\n")
    end = 1 + max(text.rfind(digit) for digit in "0123456789")
    # The pattern is quadratic on long runs of digits and commas, so it only sees a window; a short one mostly does.
    window_chars = 64
    while end > 0:
        start = max(0, end - window_chars)
        found = _last_match(text[start : end + 16])
        if found is not None and (start == 0 or found[1].start() >= _MARGIN_CHARS):
            number, match = found
            return None if len(match.group()) > MAX_NUMBER_CHARS else (number, match.group().strip())
        if window_chars < 2 * _STEP_CHARS:
            window_chars = 2 * _STEP_CHARS
        elif found is not None and len(found[1].group()) > MAX_NUMBER_CHARS:
            return None
        else:
            end = start + _STEP_CHARS if start > 0 else 0
    return None


def _last_match(text: str) -> tuple[Number, re.Match[str]] | None:
    for match in reversed(list(_NUMBER.finditer(_respell(text)))):
        number = _to_number(match)
        if number is not None:
            return number, match
    return None


def first_number(text: str) -> tuple[Number, str] | None:
    """The first number in a short text, and how it is written."""
    for match in _NUMBER.finditer(_respell(text[:MAX_NUMBER_CHARS])):
        number = _to_number(match)
        if number is not None:
            return number, match.group().strip()
    return None
