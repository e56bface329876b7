r"""Parses the meaning of an answer in LaTeX or plain text: values, lists, sets, points, intervals and relations.

The structure (separators, brackets, relation signs) is parsed here, single expressions by latex2sympy. No part of a text
is skipped: a text that cannot be parsed as a whole raises ``ParseError``.
"""
# ruff: noqa: RUF001 (signs of mathematics look like others)

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from megatron_rl.graders.answers.expressions import ParseError, Value, read_value, same_value, unknowns
from megatron_rl.graders.answers.number_parsing import GREEK, respell

_MAX_WORDS = 4
_PROSE = re.compile(r"(?<![A-Za-z\\{])[A-Za-z]*[a-z]{3}(?![A-Za-z}])")
_MAX_DEPTH = 60
"""Maximum nesting depth of brackets."""


@dataclass(frozen=True)
class Collection:
    """Several items. ``kind`` is ``list`` (bare), ``or`` (bare, joined by "or"), ``{``, or a pair of brackets."""

    kind: str
    items: tuple["Meaning", ...]


@dataclass(frozen=True)
class Assignment:
    """An assignment ``name = value``, also ``x in S`` and ``f(3) = 5``."""

    name: str
    value: "Meaning"
    written: str = field(default="", compare=False)
    """The name as LaTeX."""


@dataclass(frozen=True)
class Relation:
    """A chain ``sides[0] signs[0] sides[1] ...``; signs are ``= != < <= > >=``."""

    sides: tuple[Value, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True)
class Union:
    parts: tuple["Meaning", ...]


BARE = ("list", "or")
Meaning = Value | Collection | Assignment | Relation | Union

_TOKEN = re.compile(
    r"\\(?:begin|end)\s*\{[a-z]*matrix\}|\\[{}]|\\(?:[A-Za-z]+|.)|<=|>=|!=|:=|[<>=(){}\[\],;|]|(?<![A-Za-z])(?:and|or)(?![A-Za-z])",
    re.DOTALL,
)
_OPENING = ("(", "[", "{", "\\{", "\\langle", "\\lfloor", "\\lceil", "\\begin")
_CLOSING = (")", "]", "}", "\\}", "\\rangle", "\\rfloor", "\\rceil", "\\end")
_SEPARATORS = {"and": "and", "or": "or", "\\lor": "or", "\\vee": "or", "\\land": "and", "\\wedge": "and"}
_SIGNS = {
    "=": "=", ":=": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=", "\\ne": "!=", "\\neq": "!=",
    "\\lt": "<", "\\gt": ">", "\\le": "<=", "\\leq": "<=", "\\leqslant": "<=", "\\ge": ">=", "\\geq": ">=",
    "\\geqslant": ">=", "\\in": "in", "\\approx": "~", "\\simeq": "~", "\\equiv": "==", "\\to": "to",
}  # fmt: skip
_SPELLINGS = (
    ("\\textnormal", "\\text"), ("\\textbf", "\\text"), ("\\textit", "\\text"), ("\\textrm", "\\text"),
    ("\\mathrm", "\\text"), ("\\mathbf", "\\text"), ("\\mbox", "\\text"), ("\\operatorname", "\\text"),
    ("\\displaystyle", ""), ("\\bigl", ""), ("\\bigr", ""), ("\\Bigl", ""), ("\\Bigr", ""), ("\\big", ""),
    ("\\Big", ""), ("\\dots", "\\ldots"), ("\\lbrace", "\\{"), ("\\rbrace", "\\}"), ("\\lbrack", "["),
    ("\\rbrack", "]"), ("\\backslash", "\\setminus"), ("\\iff", "\\text{ and }"), ("\\varnothing", "\\emptyset"),
    ("\\quad", ", "), ("\\qquad", ", "), ("\\lvert", "|"), ("\\rvert", "|"), ("\\vert", "|"), ("\\mid", "|"),
    ("\\colon", ":"), ("\\land", " and "), ("\\lor", " or "),
)  # fmt: skip
_UNICODE = {
    "√": "\\sqrt ", "∞": "\\infty ", "π": "\\pi ", "θ": "\\theta ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ",
    "⩽": "\\le ", "⩾": "\\ge ", "≈": "\\approx ", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "/",
    "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ", "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}",
    "ℕ": "\\mathbb{N}", "±": "\\pm ", "∓": "\\mp ", "°": "^\\circ ", "′": "'", "∠": "\\angle ", "∨": " or ",
    "∧": " and ", "α": "\\alpha ", "β": "\\beta ", "γ": "\\gamma ", "λ": "\\lambda ", "φ": "\\phi ",
}  # fmt: skip
_UNICODE_TABLE = str.maketrans(_UNICODE)
_POWERS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_COMMAND = {name: re.compile(re.escape(name) + r"(?![A-Za-z])") for name, _ in _SPELLINGS}
_PLAIN_NAMES = re.compile(r"(?<![A-Za-z\\])(sqrt|pi|sin|cos|tan|log|ln|exp|infinity|infty|inf|oo|theta)(?![A-Za-z])")
_THOUSANDS = re.compile(r"(?<![0-9.,])([1-9][0-9]{0,2})((?:,[0-9]{3})+)(?![0-9]|,[0-9])")
_NAME = re.compile(
    r"(?: [A-Za-z] | "
    + GREEK
    + r""" | \\text\{[A-Za-z\ ]+\} | [A-Z]{2,4} | [A-Za-z]+(?=\s*\()
    | [A-Za-z]{3,}(?:\ [A-Za-z]+)* )
    '* (?: _(?: [A-Za-z0-9] | \{[^{}]*\} | \\[a-z]+ ) )? '* (?: \s*\([^()=]*\) )? (?:\s*\^\\circ)?""",
    re.VERBOSE,
)
_CONDITION = re.compile(r"\s*[a-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?[|:](.*[<>=].*|.*\\(?:[lg]eq?|ne|in)(?![a-z]).*)")
_GLUED = re.compile(r"(?<=[0-9)}\]])(or|and)(?=[A-Za-z](?:\([a-z]\))?\s*=)")
_SEGMENTS = re.compile(r"(?=.*[A-Z]).*")
_SEGMENT_MARKS = re.compile(
    r"""\\(?:angle|triangle|overline|widehat|overrightarrow|frac|left|right|text|mathbf|vec|quad) | [A-Z]
    | _(?:[A-Za-z0-9]|\{[A-Za-z0-9]*\}) | [{}|:()/'\ ] | \\[ ,]""",
    re.VERBOSE,
)


def read(text: str) -> Meaning:
    """Parse the meaning of the whole ``text``.

    Raises:
        ParseError: the text as a whole is not mathematics, divides by zero, or is too large to compute.
    """
    meaning = _read_once(_respell(text))
    if isinstance(meaning, str):
        raise ParseError(meaning)
    return meaning


@lru_cache(maxsize=4096)
def _read_once(text: str) -> Meaning | str:
    """Meaning, or the reason why there is none. Cached, because responses to one prompt share their ground truth and
    answers."""
    # Reject prose early, because the LaTeX parser is slow and reads words as products of variables.
    if len(_PROSE.findall(text)) > _MAX_WORDS:
        return "prose"
    try:
        return _read(text, 0)
    except ParseError as error:
        return str(error)


def _respell(text: str) -> str:
    """Replace Unicode signs and alternative LaTeX commands by one LaTeX spelling each; drop layout commands and ``$``."""
    text = respell(text).translate(_UNICODE_TABLE)
    text = _SUPERSCRIPT.sub(lambda match: "^{" + match.group().translate(_POWERS) + "}", text)
    text = (
        text.replace("\\\\", "\\\\ ")
        if "matrix" in text or "array" in text
        else re.sub(r"\\\\(?=[A-Za-z{])", r"\\", text)
    )
    for name, plain in _SPELLINGS:
        if name in text:
            text = _COMMAND[name].sub(plain.replace("\\", r"\\"), text)
    text = re.sub(r"\\[\[\]()]|\$", " ", text)
    text = _TEXT.sub(_plain_text, text)
    text = re.sub(r"\\q?quad(?=[A-Za-z](?:_|\s*=))", ", ", text)
    text = re.sub(r"\\not\s*=", r"\\ne ", text)
    text = re.sub(r"\{([^{}]*)\\choose(?![a-z])([^{}]*)\}", r"\\binom{\1}{\2}", text)
    text = re.sub(r"^\s*\\approx(?![a-z])", "", text)
    text = _GLUED.sub(r" \1 ", text).replace("**", "^")
    text = re.sub(r"(?<![A-Za-z\\])\*", r"\\cdot ", text)
    text = _PLAIN_NAMES.sub(_latex_name, text)
    return text.strip(" \t\r\n.,;:`").replace("\n", " ")


def _plain_text(match: re.Match[str]) -> str:
    word = match.group(1).strip()
    if word in ("and", "or", ",", ", and"):
        return f" {word} "
    return match.group(1) if len(word) == 1 or word[:1].isdigit() or not word else match.group()


def _latex_name(match: re.Match[str]) -> str:
    name = match.group(1)
    return "\\infty " if name.startswith("inf") or name == "oo" else f"\\{name} "


# ---------------------------------------------------------------------------------------------------------- structure


def _tokens(text: str) -> Iterator[tuple[str, int, int, int]]:
    """(token, start, end, depth before it); brackets of any kind nest, because ``[0, 1)`` is an interval."""
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        bracket = "\\begin" if token.startswith("\\begin") else "\\end" if token.startswith("\\end") else token
        if bracket in _CLOSING:
            depth -= 1
        yield token, match.start(), match.end(), depth
        if bracket in _OPENING:
            depth += 1
        if not 0 <= depth <= _MAX_DEPTH:
            raise ParseError("brackets that do not match")
    if depth:
        raise ParseError("brackets that do not match")


def _split(text: str, wanted: "frozenset[str] | set[str]") -> tuple[list[str], list[str]]:
    """(parts of ``text`` between separators, the separators): a separator is a token in ``wanted`` outside brackets."""
    parts, separators, start = [], [], 0
    for token, token_start, token_end, depth in _tokens(text):
        if depth == 0 and token in wanted:
            parts.append(text[start:token_start])
            separators.append(token)
            start = token_end
    return [*parts, text[start:]], separators


def _read(text: str, depth: int) -> Meaning:
    text = text.strip(" ,;~")
    if not text or depth > _MAX_DEPTH:
        raise ParseError("nothing")
    text = text if depth else _without_thousands(text)
    # Semicolons bind weaker than commas: "1, 2; 3, 4" is a list of two points.
    for separators in ({";"}, {",", *_SEPARATORS}):
        parts, found = _split(text, separators)
        items = [part for part in parts if part.strip(" ~")]
        if len(items) > 1:
            kind = "or" if any(_SEPARATORS.get(token) == "or" for token in found) else "list"
            return _list(
                kind,
                [_read_relation(item, depth) for item in items]
                if ";" not in separators
                else [_read(item, depth) for item in items],
            )
    return _read_relation(text, depth)


def _list(kind: str, items: list[Meaning]) -> Meaning:
    """Build a list. In ``x = 1, 2`` the name applies to every item; a list of ``p = 5, q = 2`` is a list of points."""
    if all(isinstance(item, Collection) and item.kind in BARE and len(item.items) > 1 for item in items):
        items = [Collection("()", item.items) for item in items if isinstance(item, Collection)]
    items = _flat(items)
    if isinstance(items[0], Assignment) and not any(isinstance(item, Assignment | Relation) for item in items[1:]):
        name = items[0].name
        items = [items[0], *(Assignment(name, item) for item in items[1:])]
    return Collection(kind, tuple(items))


def _flat(items: list[Meaning]) -> list[Meaning]:
    r"""Flatten lists in lists: ``1 \pm 2, 5`` is three numbers."""
    flat: list[Meaning] = []
    for item in items:
        if isinstance(item, Collection) and item.kind in BARE:
            flat.extend(item.items)
        elif isinstance(item, Assignment) and isinstance(item.value, Collection) and item.value.kind in BARE:
            flat.extend(Assignment(item.name, value) for value in item.value.items)
        else:
            flat.append(item)
    return flat


def _without_thousands(text: str) -> str:
    """Remove thousands separators: 12,345 is one number, but (12,345) is a point."""
    if not _THOUSANDS.search(text):
        return text
    depths = {start: depth for token, start, _, depth in _tokens(text) if token == ","}

    def join(match: re.Match[str]) -> str:
        inside = depths.get(match.end(1), 0)
        return match.group() if inside else match.group().replace(",", "")

    return _THOUSANDS.sub(join, text)


def _read_relation(text: str, depth: int) -> Meaning:
    parts, tokens = _split(text, set(_SIGNS))
    if not tokens:
        return _read_term(text, depth)
    signs = [_SIGNS[token] for token in tokens]
    if len(signs) > 1 and signs[-1] == "~":  # x = 1/3 ~ 0.33: keep the exact value, drop the approximation
        parts, signs = parts[:-1], signs[:-1]
    if set(signs) <= {"=", "in", "~"} and _is_name(parts[0].strip()):
        return _read_named(parts, depth)
    if set(signs) == {"="} and _is_tuple_of_names(parts[0]):
        return Assignment(re.sub(r"\s", "", parts[0]), _read_term(parts[-1], depth))
    if set(signs) == {"="} and len(parts) > 2:
        return _read_chain(parts, depth)
    if not set(signs) <= {"=", "!=", "<", "<=", ">", ">="}:
        raise ParseError("about equal, congruent, a map or an element")
    sides = [_read_term(part, depth) for part in parts]
    if not all(isinstance(side, Value) and not side.text and hasattr(side.expression, "is_Add") for side in sides):
        raise ParseError("a relation between operands that are not numbers")
    return _settled(Relation(tuple(side for side in sides if isinstance(side, Value)), tuple(signs)))


def _settled(relation: Relation) -> Meaning:
    """The right side of a true equation between numbers, ``2 + 3 = 5``; a relation with an unknown is unchanged.

    Raises ParseError for any other relation between numbers.
    """
    if any(unknowns(side.expression) for side in relation.sides):
        return relation
    if relation.signs != ("=",) or not same_value(*relation.sides):
        raise ParseError("a relation between numbers that is trivial or not true")
    return relation.sides[1]


def _read_named(parts: list[str], depth: int) -> Assignment:
    """Parse a name and its last value; the steps in between, as in ``x = 2 + 3 = 5``, are only checked for syntax."""
    value = _read_term(parts[-1], depth)
    for part in parts[1:-1]:
        _read_term(part, depth)
    return Assignment(_name(parts[0]), value, parts[0].strip())


def _read_chain(parts: list[str], depth: int) -> Meaning:
    """Last side of a chain of equations, all of which must hold."""
    meanings = [_read_term(part, depth) for part in parts]
    last = meanings[-1]
    for meaning in meanings[:-1]:
        if not (isinstance(meaning, Value) and isinstance(last, Value) and same_value(meaning, last)):
            raise ParseError("a chain of equations that is not true")
    return last


def _is_name(text: str) -> bool:
    if text in ("\\pi", "e", "i", "\\infty", "\\emptyset"):
        return False
    return bool(_NAME.fullmatch(text) or (_SEGMENTS.fullmatch(text) and not _SEGMENT_MARKS.sub("", text)))


def _is_tuple_of_names(text: str) -> bool:
    text = text.strip()
    if not (text.startswith("(") and text.endswith(")")):
        return False
    return all(_is_name(part.strip()) for part in text[1:-1].split(","))


def _name(text: str) -> str:
    """The name without markup and without a function's variable: f for f(x), but f(3) for f(3)."""
    return re.sub(r"\\text|[{}\s\\]|\([a-z]\)$", "", text.strip())


def _read_term(text: str, depth: int) -> Meaning:
    text = text.strip(" ~")
    parts, found = _split(text, {"\\cup"})
    if found:
        return Union(tuple(_read_term(part, depth + 1) for part in parts))
    tokens = list(_tokens(text))
    if tokens and tokens[0][1] == 0 and tokens[-1][2] == len(text) and tokens[0][0] in _OPENING:
        closes = next((end for token, _, end, level in tokens[1:] if level == 0 and token in _CLOSING), 0)
        if closes == len(text):
            group = _read_group(text, tokens[0][0], tokens[-1][0], depth)
            if group is not None:
                return group
    values = read_value(text)
    return values[0] if len(values) == 1 else Collection("list", tuple(values))


def _read_group(text: str, opening: str, closing: str, depth: int) -> Meaning | None:
    """Parse bracketed ``text`` as a point, interval, set or plain term; None if the brackets belong to an expression."""
    inner = text[len(opening) : -len(closing)]
    kind = "{" if opening == "\\{" else "()" if opening == "\\langle" else opening + closing
    if kind == "{" and not inner.strip():
        return Collection("{", ())
    parts, found = _split(inner, {",", ";"})
    if kind == "{":
        if condition := _CONDITION.fullmatch(inner):
            return _read(condition[1], depth + 1)
        if "|" in inner or ":" in inner:
            raise ParseError("a set by a condition on more than one number")
        return Collection("{", tuple(_flat([_read_relation(part, depth + 1) for part in parts])))
    if kind == "{}" or (not found and kind == "()"):
        return _read(inner, depth + 1)
    if not found or kind not in ("()", "[]", "[)", "(]"):
        return None
    return Collection(kind, tuple(_read_relation(part, depth + 1) for part in parts))
