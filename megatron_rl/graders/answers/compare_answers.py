"""Decides whether two answers have the same meaning (``parse_answer.py``).

Numbers and formulas are compared by value. Equations and inequalities are compared as relations, up to a nonzero
constant factor (a negative factor reverses an inequality). Sets are compared in any order, points in order, intervals
with their ends, and inequalities as the intervals that they describe.
"""

import re
from itertools import pairwise
from typing import Any

from megatron_rl.graders.answers.expressions import (
    ParseError,
    Value,
    at_points,
    close,
    parse_latex,
    same_expression,
    same_value,
    unknowns,
)
from megatron_rl.graders.answers.parse_answer import BARE, Assignment, Collection, Meaning, Relation, Union

_INTERVALS = ("()", "[]", "[)", "(]")
_TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def same(first: Meaning, second: Meaning) -> bool:
    """True if both meanings are equal."""
    first, second = _single(first), _single(second)
    if isinstance(first, Assignment) or isinstance(second, Assignment):
        return _same_named(first, second)
    if isinstance(first, Value) and isinstance(second, Value):
        return same_value(first, second)
    if isinstance(first, Relation) and isinstance(second, Relation):
        return _same_relation(first, second) or _same_set(first, second)
    if isinstance(first, Collection) and isinstance(second, Collection) and _same_group(first, second):
        return True
    return _same_set(first, second)


def _single(meaning: Meaning) -> Meaning:
    """The only item of a list or set with one item; other meanings unchanged."""
    while isinstance(meaning, Collection) and len(set(meaning.items)) == 1 and meaning.kind in (*BARE, "{"):
        meaning = meaning.items[0]
    return meaning


def _same_named(first: Meaning, second: Meaning) -> bool:
    """Compare two meanings, at least one of them an ``Assignment``. x = 5 equals 5 and x = 5. Against y = 5 or another
    relation such as x - 5 = 0, x = 5 is compared as an equation."""
    if isinstance(first, Assignment) and isinstance(second, Assignment) and first.name == second.name:
        return same(first.value, second.value)
    if any(isinstance(each, Assignment) and not isinstance(each.value, Value) for each in (first, second)):
        return same(*(each.value if isinstance(each, Assignment) else each for each in (first, second)))
    as_relations = [_as_relation(each) if isinstance(each, Assignment) else each for each in (first, second)]
    if all(isinstance(each, Assignment | Relation) for each in (first, second)):
        one, other = as_relations
        return isinstance(one, Relation) and isinstance(other, Relation) and _same_relation(one, other)
    return same(*(each.value if isinstance(each, Assignment) else each for each in (first, second)))


def _as_relation(named: Assignment) -> Relation | None:
    if not isinstance(named.value, Value) or named.value.text:
        return None
    try:
        name = parse_latex(named.written)
    except ParseError:
        return None
    return Relation((Value(name), named.value), ("=",)) if hasattr(name, "is_Add") else None


# -------------------------------------------------------------------------------------------------------------- groups


def _same_group(first: Collection, second: Collection) -> bool:
    kinds = {first.kind, second.kind}
    if kinds <= {*BARE, "{"}:
        return _same_list(first, second)
    if len(kinds) > 1 and not kinds <= {*BARE, "()"}:
        return False
    # Compared with a bare 1, 2, (1, 2) is a point; compared with 1 < x, x < 2 it is an interval (_same_set).
    return len(first.items) == len(second.items) and all(map(same, first.items, second.items))


def _same_list(first: Collection, second: Collection) -> bool:
    """Compare lists and sets in any order, unless different names identify the items."""
    if _relations(first) and _relations(second) and first.kind != second.kind:
        return False  # "and" is not "or"
    if _distinct_names(first) != _distinct_names(second):
        values = [
            [item.value if isinstance(item, Assignment) else item for item in group.items] for group in (first, second)
        ]
        return len(values[0]) == len(values[1]) and all(map(same, *values))
    return _same_items(_unique(first.items), _unique(second.items))


def _relations(group: Collection) -> bool:
    return any(isinstance(item, Relation) and item.signs != ("=",) for item in group.items)


def _distinct_names(group: Collection) -> bool:
    """True for different names such as x and y, but not for x_1 and x_2, which are roots in any order."""
    names = [re.sub("_.*|[0-9]+$", "", item.name) for item in group.items if isinstance(item, Assignment)]
    return len(set(names)) > 1


def _unique(items: tuple[Meaning, ...]) -> list[Meaning]:
    return list(dict.fromkeys(items))


def _same_items(first: list[Meaning], second: list[Meaning]) -> bool:
    """True if the items can be paired. Items with equal spelling are paired first, so that long lists are fast."""
    if len(first) != len(second):
        return False
    # Only items without an equal spelling need the quadratic comparison by meaning.
    common = set(first) & set(second)
    left = [item for item in second if item not in common]
    for item in first:
        if item in common:
            continue
        partner = next((index for index, other in enumerate(left) if same(item, other)), None)
        if partner is None:
            return False
        del left[partner]
    return True


# ----------------------------------------------------------------------------------------------------------- relations


def _same_relation(first: Relation, second: Relation) -> bool:
    """True if the pairs of neighboring sides are in the same relations."""
    left = _pairs(second)
    for pair in _pairs(first):
        partner = next((index for index, other in enumerate(left) if _same_pair(*pair, *other)), None)
        if partner is None:
            return False
        del left[partner]
    return not left


def _pairs(relation: Relation) -> list[tuple[str, Any]]:
    """(sign, difference) of neighboring sides, with the signs =, !=, <, <= only."""
    pairs = []
    for sign, (left, right) in zip(relation.signs, pairwise(relation.sides), strict=True):
        turned = sign in (">", ">=")
        difference = left.expression - right.expression
        pairs.append((_TURNED[sign], -difference) if turned else (sign, difference))
    return pairs


def _same_pair(sign: str, first: Any, other_sign: str, second: Any) -> bool:
    """True if the differences have the same nonzero ratio at all points, and a positive ratio for inequalities."""
    if sign != other_sign or unknowns(first.expand()) != unknowns(second.expand()):
        return False
    ratio = None
    for one, other in zip(at_points(first, second), at_points(second, first), strict=True):
        if one is None or other is None or one == 0 or other == 0:
            if one is None or other is None or bool(one == 0) != bool(other == 0):
                return False
            continue
        ratio_here = one / other
        if ratio is not None and not close(ratio_here, ratio):
            return False
        ratio = ratio_here
    return ratio is not None and (sign in ("=", "!=") or bool(ratio.is_real and ratio > 0))


# ---------------------------------------------------------------------------------------------------------------- sets


def _same_set(first: Meaning, second: Meaning) -> bool:
    """True if both describe the same set of numbers: intervals, unions, inequalities in one unknown."""
    one, other = _as_set(first), _as_set(second)
    if one is None or other is None:
        return False
    if one == other:
        return True
    intervals, others = _intervals(one), _intervals(other)
    if intervals is None or others is None or len(intervals) != len(others):
        return False
    return all(
        ours[2:] == theirs[2:] and same_expression(ours[0], theirs[0]) and same_expression(ours[1], theirs[1])
        for ours, theirs in zip(intervals, others, strict=True)
    )


def _intervals(numbers: Any) -> list[tuple[Any, Any, bool, bool]] | None:
    """(start, end, left end open, right end open) of each interval, from left to right; None if not a union of
    intervals."""
    from sympy import FiniteSet, Interval
    from sympy import Union as SetUnion

    pieces = []
    for part in numbers.args if isinstance(numbers, SetUnion) else [numbers]:
        if isinstance(part, Interval):
            pieces.append((part.start, part.end, bool(part.left_open), bool(part.right_open)))
        elif isinstance(part, FiniteSet):
            pieces.extend((point, point, False, False) for point in part)
        else:
            return None
    try:
        return sorted(pieces, key=lambda piece: (float(piece[0]), float(piece[1])))
    except (TypeError, ValueError, OverflowError):
        return None


def _as_set(meaning: Meaning) -> Any:
    """sympy set of the meaning's numbers; None if the meaning is not a set."""
    try:
        return _to_set(meaning)
    except MemoryError:
        raise
    except Exception:  # sympy raises many kinds on inequalities that it cannot solve
        return None


def _to_set(meaning: Meaning) -> Any:
    import sympy

    if isinstance(meaning, Assignment):
        return _to_set(meaning.value)
    if isinstance(meaning, Union):
        return sympy.Union(*map(_to_set, meaning.parts))
    if isinstance(meaning, Relation):
        return _solved(sympy.And(*_relationals(meaning)))
    if isinstance(meaning, Value):
        if isinstance(meaning.expression, sympy.Set):
            return meaning.expression
        raise ParseError("a number is not a set")
    if _relations(meaning) and meaning.kind in BARE:
        parts = [sympy.And(*_relationals(item)) for item in meaning.items if isinstance(item, Relation)]
        if len(parts) != len(meaning.items):
            raise ParseError("not only relations")
        return _solved(sympy.Or(*parts) if meaning.kind == "or" else sympy.And(*parts))
    values = [item.expression for item in meaning.items if isinstance(item, Value)]
    if len(values) == len(meaning.items) and meaning.kind == "{":
        return sympy.FiniteSet(*values)
    if len(values) == len(meaning.items) == 2 and meaning.kind in _INTERVALS and bool(values[0] < values[1]):
        return sympy.Interval(*values, meaning.kind[0] == "(", meaning.kind[1] == ")")
    raise ParseError("not a set of numbers")


def _relationals(relation: Relation) -> list[Any]:
    import sympy

    makers = {"=": sympy.Eq, "!=": sympy.Ne, "<": sympy.Lt, "<=": sympy.Le, ">": sympy.Gt, ">=": sympy.Ge}
    sides = [side.expression for side in relation.sides]
    return [makers[sign](left, right) for sign, (left, right) in zip(relation.signs, pairwise(sides), strict=True)]


def _solved(condition: Any) -> Any:
    """Numbers that satisfy a condition on one unknown."""
    import sympy

    names = unknowns(condition)
    functions = {name for name in names if not name.is_Symbol}
    names -= {symbol for function in functions for symbol in function.free_symbols}
    if len(names) != 1:
        raise ParseError("not one unknown")
    return condition.xreplace({names.pop(): sympy.Symbol("x", real=True)}).as_set()
