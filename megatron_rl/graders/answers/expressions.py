r"""Single expressions: parsed by latex2sympy, made exact, and compared by value.

Two expressions are equal if they are equal at every evaluated point: constants to 50 digits, relative; formulas at
points with positive and negative coordinates. Values are not rounded to fixed places, so small values are
compared as exactly as large ones. The only tolerance is for decimals: a value without a finite decimal, such as 1/7 or a
root, equals its decimal of six or more places.

Expressions that would take forever to compute (towers of powers, large factorials) raise ``ParseError``.
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from megatron_rl.graders.answers.number_parsing import NO_UNITS, parse_number

_MAX_DIGITS = 100_000
"""Maximum number of decimal digits of a number that is computed."""
_MAX_NODES = 5_000
_DIGITS = 50
_ERROR = 1e-35
"""Relative tolerance: more than the rounding errors of ``_DIGITS`` digits, less than any intended difference."""
_MIN_PLACES = 6
"""Minimum number of places, and of significant digits, of a decimal that may represent a value it cannot express
exactly."""
_NUM_POINTS = 4

_BASE = re.compile(r"\(?\s*([0-9A-Fa-f.]+)\s*\)?\s*_\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))")
_TIME = re.compile(r"[0-9]{1,2}:0[0-9](?::[0-9]{2})?")
_UNIT_TEXT = re.compile(r"(?<=[0-9})\]A-Za-z])\s*\\text\s*\{[^{}]*\}(?:\^(?:[23]|\{[23]\}))?$")
_UNIT_WORDS = re.compile(r"(?<=[0-9})])\s+(?!sqrt|pi\b|mod\b)[a-z]{2,}[a-z ./]*(?:\^(?:[23]|\{[23]\}))?$")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_DEGREE = re.compile(r"\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})(?![a-z])")
_LARGE_CALL = re.compile(r"\\(?:[Gg]amma|[dt]?binom)(?![A-Za-z])")


class ParseError(ValueError):
    """The text is not mathematics, or is too large to compute."""


@dataclass(frozen=True)
class Value:
    """One expression: a sympy expression, set or matrix, without floats."""

    expression: Any
    decimals: int = 0
    """Number of decimal places of a plain decimal."""
    percent: bool = False
    text: str = ""
    """Original text, for answers compared as written: ``AB``, ``10_2``."""


def read_value(text: str) -> list[Value]:
    r"""Parse ``text``: one value, or two for ``1 \pm 2``.

    Raises:
        ParseError: the text as a whole is not mathematics, or is too large to compute.
    """
    from sympy import Rational

    text = text.strip()
    if _TIME.fullmatch(text):
        return [Value(Rational(0), text=text)]
    base = _BASE.fullmatch(text)
    if base:
        return [Value(Rational(0), text=f"{base.group(1)}_{base.group(2) or base.group(3)}")]
    number = parse_number(text)
    if number is not None:
        value = Rational(number.value.numerator, number.value.denominator)
        return [Value(value, number.decimals, number.percent)]
    text = _without_unit(text)
    percent = text.endswith("%")
    text = text.rstrip("%\\ ") if percent else text
    if re.fullmatch("[A-Z]{2,}", text):
        return [Value(Rational(0), text=text)]
    return [Value(parse_latex(part), percent=percent) for part in _both_signs(text)]


def _without_unit(text: str) -> str:
    for unit in (_UNIT_TEXT, _UNIT_WORDS):
        match = unit.search(text)
        if match and NO_UNITS.isdisjoint(re.findall("[a-z]+", match.group().lower())):
            text = text[: match.start()].strip()
    return text


def _both_signs(text: str) -> list[str]:
    if not re.search(r"\\(?:pm|mp)(?![a-z])", text):
        return [text]
    plus = re.sub(r"\\mp(?![a-z])", "-", re.sub(r"\\pm(?![a-z])", "+", text))
    minus = re.sub(r"\\mp(?![a-z])", "+", re.sub(r"\\pm(?![a-z])", "-", text))
    return [re.sub(r"^\s*\+", "", part) for part in (plus, minus)]


def parse_latex(text: str) -> Any:
    """Parse ``text`` to a sympy expression with exact decimals and symbols without assumptions.

    Raises:
        ParseError: the text as a whole is not mathematics, or is too large to compute.
    """
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex
    from sympy import Basic, MatrixBase

    degree = r"\\cdot\\frac{\\pi}{180}" if _TRIGONOMETRY.search(text) else ""
    text = _DEGREE.sub(degree, text)
    # units=False, because the parser would take the t of 2t for a unit.
    config = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    for match in _LARGE_CALL.finditer(text):
        if re.search(r"[0-9]{5}|\^|!", text[match.end() :]):
            raise ParseError("too large")  # the parser itself would compute it
    try:
        latex = normalize_latex(text, config=config)
        parsed = latex2sympy(latex, is_real=False, convert_degrees=False, normalization_config=None)
    except MemoryError:
        raise
    except Exception as error:  # the parser raises many kinds of errors on other text
        raise ParseError(f"not mathematics ({type(error).__name__})") from error
    if not isinstance(parsed, Basic | MatrixBase):
        raise ParseError("not mathematics")
    try:
        return _exact(parsed)
    except (ArithmeticError, TypeError, AttributeError, RecursionError) as error:
        raise ParseError(f"not mathematics ({type(error).__name__})") from error


def _exact(parsed: Any) -> Any:
    from sympy import Float, I, MatrixBase, Rational, Symbol, UnevaluatedExpr, nan, zoo
    from sympy.core.relational import Relational

    if parsed.has(nan, zoo):
        raise ParseError("not a number")
    if parsed.has(Relational):
        raise ParseError("a relation inside an expression")
    for element in parsed.flat() if isinstance(parsed, MatrixBase) else [parsed]:
        _refuse_large(element)
    changes: dict[Any, Any] = {number: Rational(str(number)) for number in parsed.atoms(Float)}
    changes |= {symbol: I if symbol.name in "iI" else Symbol(symbol.name) for symbol in parsed.atoms(Symbol)}
    exact = parsed.xreplace(changes)
    if exact.has(UnevaluatedExpr):
        exact = exact.replace(UnevaluatedExpr, lambda inner: inner)
    return exact.as_immutable() if isinstance(exact, MatrixBase) else exact


# ---------------------------------------------------------------------------------------------------------- size limits


def _refuse_large(parsed: Any) -> None:
    """Reject numbers with too many digits before they are computed."""
    from sympy import preorder_traversal

    for count, node in enumerate(preorder_traversal(parsed)):
        if count > _MAX_NODES or _digits(node) > _MAX_DIGITS:
            raise ParseError("too large")


def _digits(node: Any) -> float:
    """Upper estimate of the decimal digits of numerator or denominator; infinite if the estimate itself overflows."""
    from sympy import binomial, factorial, factorial2, gamma

    try:
        if getattr(node, "is_Rational", False):
            return max(abs(int(node.p)), int(node.q)).bit_length() * math.log10(2)
        if getattr(node, "is_Float", False):
            return abs(math.log10(abs(float(node)) or 1.0))
        parts = [_digits(part) for part in node.args]
        if getattr(node, "is_Pow", False):
            return float(max(1.0, parts[0]) * _size(node.args[1], parts[1]))
        if isinstance(node, factorial | factorial2 | gamma | binomial):
            return float(max(parts) * 10.0 ** max(parts))
        return max(parts, default=0.0) + math.log10(len(parts) or 1) if getattr(node, "is_Add", False) else sum(parts)
    except (OverflowError, ValueError):
        return math.inf


def _size(exponent: Any, digits: float) -> float:
    """Estimated absolute value of an exponent; computed only if that is safe."""
    if unknowns(exponent):
        return 1.0 if digits < 3 else 10.0**digits
    number = _number(exponent) if digits < 1000 else None
    return float(10.0**digits if number is None else abs(number))


# ------------------------------------------------------------------------------------------------------------- equality


def same_value(first: Value, second: Value) -> bool:
    """True if both are the same number, formula or matrix. A percentage equals itself, its count and its share."""
    if first.text or second.text:
        return first.text == second.text
    if _same_written(first, second):
        return True
    if first.percent == second.percent:
        return False
    percentage, plain = (first, second) if first.percent else (second, first)
    share = Value(percentage.expression / 100, percentage.decimals + 2 * bool(percentage.decimals))
    return _same_written(share, plain)


def _same_written(first: Value, second: Value) -> bool:
    """True if the values are equal, or if one is a decimal that represents the other."""
    if same_expression(first.expression, second.expression):
        return True
    for decimal, exact in ((first, second), (second, first)):
        if decimal.decimals >= _MIN_PLACES and not exact.decimals and _stands_for(decimal, exact.expression):
            return True
    return False


def _stands_for(decimal: Value, exact: Any) -> bool:
    """True if a decimal is the value rounded or truncated at its last place, or a float's spelling of it."""
    written = Fraction(int(decimal.expression.p), int(decimal.expression.q))
    unit = Fraction(1, 10**decimal.decimals)
    if abs(written) < unit * 10 ** (_MIN_PLACES - 1):  # fewer significant digits
        return False
    if getattr(exact, "is_Rational", False):
        if _is_finite_decimal(int(exact.q)):
            return False  # the exact value has a finite decimal
        value = Fraction(int(exact.p), int(exact.q))
    else:
        number = _number(exact)
        if number is None or not number.is_real:
            return False
        value = Fraction(str(number))
    distance = abs(written - value)
    truncated = decimal.decimals > _MIN_PLACES and abs(written) <= abs(value) and distance < unit
    return truncated or distance <= max(unit / 2, abs(value) * Fraction(1, 10**14))


def _is_finite_decimal(denominator: int) -> bool:
    for factor in (2, 5):
        while denominator % factor == 0:
            denominator //= factor
    return denominator == 1


def same_expression(first: Any, second: Any) -> bool:
    """True if two expressions, sets or matrices have equal values."""
    from sympy import Expr, MatrixBase

    if first == second:
        return True
    first, second = _computed(first), _computed(second)
    if isinstance(first, MatrixBase) and isinstance(second, MatrixBase):
        return first.shape == second.shape and all(map(same_expression, first.flat(), second.flat()))
    if not isinstance(first, Expr) or not isinstance(second, Expr):
        return bool(first == second)
    if first == second:
        return True
    if first.is_Rational and second.is_Rational:
        return False
    pairs = list(zip(at_points(first, second), at_points(second, first), strict=True))
    if any((one is None) != (other is None) for one, other in pairs):
        return False  # only one is defined at some point
    pairs = [(one, other) for one, other in pairs if one is not None]
    return bool(pairs) and all(close(one, other, first, second) for one, other in pairs)


def _computed(expression: Any) -> Any:
    """The expression with sums, integrals and factorials computed, if possible."""
    try:
        return expression.doit()
    except MemoryError:
        raise
    except Exception:  # sympy raises many kinds of errors; keep the expression unchanged
        return expression


def at_points(expression: Any, *others: Any) -> list[Any]:
    """Values at a few points for the symbols of all expressions; None at points without a value."""
    unknown = sorted({unknown for each in (expression, *others) for unknown in unknowns(each)}, key=str)
    if not unknown:
        return [_number(expression)]
    return [_number(expression.xreplace(_point(unknown, index))) for index in range(_NUM_POINTS)]


def unknowns(expression: Any) -> set[Any]:
    """Symbols of an expression, and its undefined functions such as f(3)."""
    from sympy.core.function import AppliedUndef

    return set(expression.atoms(AppliedUndef) | expression.free_symbols)


def _point(unknown: list[Any], index: int) -> dict[Any, Any]:
    """Test point ``index``, with coordinates of size 1/2 to 5/2: all positive (0, 1), all negative (2), or mixed (3)."""
    from sympy import Rational

    point = {}
    for position, name in enumerate(unknown):
        size = Rational((position + 1) * 7919 + (index + 1) * 4409, 1000) % 2 + Rational(1, 2) + Rational(index, 997)
        negative = index == 2 or (index == 3 and position % 2 == 0)
        point[name] = -size if negative else size
    return point


def _number(expression: Any) -> Any:
    """Value to ``_DIGITS`` digits, or None if the expression has no finite value."""
    try:
        value = expression.evalf(_DIGITS)
    except MemoryError:
        raise
    except Exception:  # sympy raises many kinds of errors; the value is undefined
        return None
    return value if value.is_number and value.is_finite and not value.free_symbols else None


def close(one: Any, other: Any, *sources: Any) -> bool:
    """True if two numbers are equal within rounding errors."""
    from sympy import Add

    scale = max(abs(one), abs(other))
    if scale == 0:
        return True
    if scale < 1e-20:  # terms that cancel leave rounding noise, which is relative to the size of the terms
        terms = [
            abs(number)
            for source in sources
            if isinstance(source, Add)
            for number in map(_number, source.args)
            if number
        ]
        scale = max([scale, *terms])
    return bool(abs(one - other) <= _ERROR * scale)
