r"""Parses plain numbers exactly, as fractions.

Integers, decimals, thousands separators, signs, currencies, percent, fractions, mixed numbers, powers of ten, LaTeX and
Unicode spellings of all these, with units after them. All other answers are parsed by ``parse_answer.py``.

Invariants: every function takes time linear in the text, for any text; numbers longer than ``MAX_NUMBER_CHARS`` are
rejected; only ASCII digits are digits.
"""
# ruff: noqa: RUF001 (signs of mathematics look like others)

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_NUMBER_CHARS = 256
_MARGIN_CHARS = 32
"""Characters to the left of a number that can change its meaning: a sign, a caret, the numerator of a LaTeX fraction.
"""
_STEP_CHARS = MAX_NUMBER_CHARS + 2 * _MARGIN_CHARS

_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
NO_UNITS = frozenset(
    "pi sqrt log ln exp sin cos tan cot sec csc arcsin arccos arctan inf infty infinity mod and or to half not maybe "
    "perhaps possibly probably either neither nor if unless except wrong incorrect thousand million billion trillion "
    "than least most factorial squared cubed choose base through".split()
)
"""Words after a number that give it another meaning than a number with a unit."""
_SPACED = re.compile(r"[+-]?[1-9][0-9]{0,2}(?: [0-9]{3})+(?:\.[0-9]+)?")
"""Matches thousands separated by spaces, such as 1 000 000."""

_NUMBER = re.compile(
    r"""
    (?= [-+$.0-9] )                                            # most positions fail here, which is quick
    (?<![A-Za-z0-9_.^]) (?<!\^-) (?<![\^_]\{) (?<!\^\{-)       # not inside a word, an exponent or an index
    (?P<in_date> (?<= [0-9]/ ) )?                              # 12/25/2020 contains no fraction
    (?P<sign> (?<![0-9A-Za-z)\]}%]) [-+] )? \$?                # 5-3 is two numbers without a sign; -$5
    (?P<sign_after> (?<=\$) [-+] )?                            # $-5
    (?> (?P<mixed> [0-9]+ ) [ ]+ (?= [0-9]+/[0-9]+ (?![0-9./]) ) )?
    (?> (?P<whole> [1-9][0-9]{0,2} (?:,[0-9]{3})+ (?![0-9]) | [0-9]+ )? (?P<decimals> \.[0-9]+ )? )
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
_LATEX_FRACTION = re.compile(
    r"([0-9]?)\s*\\[dtc]?frac\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))"
)
_REPEATING = re.compile(r"([0-9]{0,20})\.([0-9]{0,20})\\(?:overline|bar|dot)\s*\{?([0-9]{1,20})\}?")
_LATEX_TEXT = re.compile(r"\\(?:text|textbf|textnormal|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
GREEK = (
    r"\\(?:(?:var)?(?:epsilon|theta|phi|rho|sigma)|alpha|beta|gamma|delta|zeta|eta|iota|kappa|lambda|mu|nu|xi|tau|upsilon|chi"
    r"|psi|omega|ell|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega)(?![A-Za-z])"
)
"""Pattern of the LaTeX commands that may name a number."""
_ASSIGNED = re.compile(
    rf"(?:[A-Za-z]|{GREEK}|[A-Za-z]+ ?\([^()=<>]{{1,40}}\)|[A-Za-z]{{3,}}(?: [A-Za-z]+){{0,4}})"
    r"(?:_(?:[A-Za-z0-9]|\{[A-Za-z0-9]+\}))? *= *"
)
"""Matches a name and equals sign before a number: x, x_1, f(3), P(A), total cost."""
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060-\u2064\ufeff\ufe0f]")
_MINUS = re.compile("[\u2010-\u2015\u2212\ufe63\uff0d]")
_FULL_WIDTH = {0xFEE0 + code: code for code in range(0x21, 0x7F)}
_NEGATIVE_SPACE = re.compile(r"\\!\s*|\s?\{\s?,\s?\}")
_VULGAR = {
    "½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5",
    "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8", "⅐": "1/7", "⅑": "1/9", "⅒": "1/10",
}  # fmt: skip
_VULGAR_FRACTION = re.compile(f"[{''.join(_VULGAR)}]")
_SPELLINGS = (
    (r"\$", "$"),
    ("€", "$"),
    ("£", "$"),
    ("¥", "$"),
    ("₹", "$"),
    (r"\%", "%"),
    (r"\,", ""),
    (r"\;", " "),
    (r"\:", " "),
    (r"\ ", " "),
    ("\u00a0", " "),
    ("\u202f", " "),
    ("\u2009", " "),
    ("~", " "),
    (r"\left", ""),
    (r"\right", ""),
    (r"^\circ", "°"),
    (r"^{\circ}", "°"),
    (r"\degree", "°"),
    ("％", "%"),
    ("⁄", "/"),
)


@dataclass(frozen=True)
class ParsedNumber:
    """A parsed number: ``50%`` has value 50 and ``percent`` set."""

    value: Fraction
    percent: bool = False
    decimals: int = 0
    """Number of decimal places, if written as a plain decimal."""

    def equals(self, other: "ParsedNumber") -> bool:
        """Exact equality. 50% equals 50% and, if the other number is not a percentage, both 50 and 0.5."""
        if self.value == other.value:
            return True
        if self.percent == other.percent:
            return False
        percentage, plain = (self, other) if self.percent else (other, self)
        return percentage.value / 100 == plain.value

    def __str__(self) -> str:
        return f"{self.value}{'%' if self.percent else ''}"


# ----------------------------------------------------------------------------------------------------- number parsing


def respell(text: str) -> str:
    """Normalize LaTeX and Unicode spellings used in numbers; invisible characters are removed."""
    if not text.isascii():
        text = _MINUS.sub("-", _INVISIBLE.sub("", text)).translate(_FULL_WIDTH)
        text = _VULGAR_FRACTION.sub(_latex_fraction, text)
    text = _NEGATIVE_SPACE.sub(lambda match: "," if "," in match.group() else "", text)
    for spelling, plain in _SPELLINGS:
        text = text.replace(spelling, plain)
    return text


def _latex_fraction(match: re.Match[str]) -> str:
    top, _, bottom = _VULGAR[match.group()].partition("/")
    return f"\\frac{{{top}}}{{{bottom}}}"


def _plain(text: str) -> str:
    """Same as ``respell``, and LaTeX fractions and repeating decimals become ``1/2`` and ``15/90``."""
    text = respell(text)
    return _LATEX_FRACTION.sub(_plain_fraction, _REPEATING.sub(_plain_repeating, text)) if "\\" in text else text


def _plain_fraction(match: re.Match[str]) -> str:
    whole, top, short_top, bottom, short_bottom = match.groups()
    return f"{whole}{' ' if whole else ''}{top or short_top}/{bottom or short_bottom}"


def _plain_repeating(match: re.Match[str]) -> str:
    r"""``0.1\overline{6}`` is 15/90."""
    whole, fixed, repeating = match.groups()
    top = int((whole + fixed + repeating) or 0) - int((whole + fixed) or 0)
    return f"{top}/{(10 ** len(repeating) - 1) * 10 ** len(fixed)}"


def _to_number(match: re.Match[str]) -> ParsedNumber | None:
    groups = match.groupdict()
    value = Fraction(int((groups["whole"] or "0").replace(",", "")))
    if groups["decimals"]:
        value += Fraction(int(groups["decimals"][1:]), 10 ** (len(groups["decimals"]) - 1))
    if groups["exponent"] or groups["power"]:
        value *= Fraction(10) ** int(groups["exponent"] or groups["power"])
    if groups["denominator"]:
        if int(groups["denominator"]) == 0:
            return None
        value /= int(groups["denominator"])
    value = (value + int(groups["mixed"] or 0)) * _SCALES.get(groups["scale"] or "", 1)
    if "-" in (groups["sign"], groups["sign_after"]):
        value = -value
    plain = not (groups["denominator"] or groups["mixed"] or groups["scale"] or groups["exponent"] or groups["power"])
    decimals = len(groups["decimals"] or ".") - 1 if plain else 0
    return ParsedNumber(value, bool(groups["percent"]), decimals)


def parse_number(text: str) -> ParsedNumber | None:
    """Parse ``text`` as a single number, with an optional unit and name ("x ="); None for any other text."""
    if len(text) > MAX_NUMBER_CHARS:
        return None
    if _INTEGER.fullmatch(text):
        return ParsedNumber(Fraction(int(text)))
    text = _LATEX_TEXT.sub(_plain_text, _plain(text)).strip()
    for left, right in ((r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"), ("$", "$")):
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
            text = text[len(left) : -len(right)].strip()
    text = text.strip("*_` \t\r\n")
    name = _ASSIGNED.match(text)
    text = text[name.end() :] if name else text
    text = re.sub(r"(?<=[0-9]) (?:percent|pct|percentage)$", "%", text)
    if _SPACED.fullmatch(text):
        text = text.replace(" ", "")
    match = _NUMBER.match(text)
    if match is None or not _is_unit(text[match.end() :]):
        return None
    return _to_number(match)


def _plain_text(match: re.Match[str]) -> str:
    """Put a unit marked as text into parentheses; a number marked as text stays that number."""
    return match.group(1) if any(char in "0123456789" for char in match.group(1)) else f" ({match.group(1)})"


def _is_unit(tail: str) -> bool:
    """True if the text after a number does not change it: nothing, punctuation or a unit.

    A single letter is not a unit (5x is not 5) unless LaTeX marks it as text, which arrives here in parentheses; 5! is
    not 5.
    """
    tail = tail.strip(" \t\r\n.$*_`")
    if not tail:
        return True
    tail = re.sub(r"(?:\^\{?[23]\}?|[²³])$", "", tail)
    if re.fullmatch(r"\([^()0-9]*\)", tail):
        return NO_UNITS.isdisjoint(re.findall(r"[a-z]+", tail.lower()))
    if not re.fullmatch(r"[A-Za-z°][A-Za-z°'\-/. ]*", tail):
        return False
    words = re.findall(r"[A-Za-z]+|°", tail)
    first = words[0]
    return (len(first) > 1 or first == "°") and NO_UNITS.isdisjoint(word.lower() for word in words)


def last_number(text: str, separator: str = "") -> tuple[ParsedNumber, str] | None:
    """Last number in ``text``, and its spelling; None without a number, or if its spelling is too long.

    Args:
        separator: Text that always separates numbers. With ",", 122,134 is the numbers 122 and 134; with "", it is one number.
    """
    if separator:
        text = text.replace(separator, "\n")
    end = 1 + max(text.rfind(digit) for digit in "0123456789")
    # The pattern is quadratic on long runs of digits and commas, so it runs on a window; a short window is usually enough.
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


def _last_match(text: str) -> tuple[ParsedNumber, re.Match[str]] | None:
    for match in reversed(list(_NUMBER.finditer(_plain(text)))):
        number = _to_number(match)
        if number is not None:
            return number, match
    return None


def all_numbers(text: str) -> list[ParsedNumber]:
    """All numbers in a short text."""
    found = (_to_number(match) for match in _NUMBER.finditer(_plain(text[: 4 * MAX_NUMBER_CHARS])))
    return [number for number in found if number is not None]
