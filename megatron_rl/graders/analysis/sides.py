"""Decides whether tests hold only by what the program has changed: its arguments, iterators that it was given, or files.

``f(a) == sorted(a)`` holds for a program that empties ``a`` and returns []. Tests that hold with a program that changed something are run
three times more: with results as they were when the program gave them, so that only changes of arguments and files reach the tests; so that
no change does; and so, with other answers than the program's. A side of a comparison that differs between the first two depends on the
changes, one that differs between the last two on the program. Each may be what is tested (``f(a); assert a == [1, 3]``) if another side
depends on neither.
"""

import ast
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron_rl.graders.analysis.value_flow import (
    CHANGING,
    Flow,
    Names,
    called,
    checks_in,
    class_uses,
    is_assertion,
    is_builtin,
    names_in,
    names_loaded,
    names_of,
    names_stored,
    raises,
    walk,
)

Record = dict[str, list[int]]
"""Maps the number of a part to the hash of its values: how many there were, of all, or of the one that all are."""
_NEVER = [0, 0, 0]
_DECIDED = "the program changed an argument or a file on which the check of its result depends"


class Site(NamedTuple):
    """An expression of the tests with parts, some of which say what the others should be."""

    parts: list[ast.expr]
    is_comparison: bool
    """True if the parts must agree; False if some may say whether, or how, the others count (``f(a) == 4 or not a``)."""
    is_check: bool = False
    """True for the condition of an assert."""
    rules_given: bool = False
    """True if a result of the program is checked, or not, by the first part."""


class Sides:
    """Sites of tests, and what of their parts is known before any run.

    Args:
        flow: Of the tests.
    """

    def __init__(self, tree: ast.Module, flow: Flow) -> None:
        self.sites = [*_sites(tree, flow)]
        self.places = {part: str(number) for number, part in enumerate(part for site in self.sites for part in site.parts)}
        """Maps each part to its key in a record."""
        self._fixed: set[ast.AST] = set(filter(_is_fixed, self.places))
        self._open = self.places.keys() - self._fixed
        self.plain = set(filter(_is_plain, self._open))
        """Parts that do not change anything when they are evaluated."""
        self._caught = _caught(tree, flow)
        self._from_program = {part for part in self._open if names_in(part, flow)}
        steers = (ast.For, ast.While, ast.If, ast.comprehension, ast.BoolOp, ast.IfExp)
        self.are_fixed = all(map(self._is_safe, self.sites)) and not any(isinstance(node, steers) for node in walk(tree))
        """True if literals decide every check."""

    def _is_safe(self, site: Site) -> bool:
        """True for parts that no change can decide."""
        num_fixed = len(self._fixed.intersection(site.parts))
        return site.is_check or num_fixed >= (1 if site.is_comparison else len(site.parts) - 1)

    def doubt(self, shared: Record, apart: Record, other: Record) -> str:
        """The reason why changes may have decided the tests; "" if they have not.

        Args:
            shared: Of the run in which changes reach the tests.
            apart: Of the run in which they do not.
            other: Of that in which other answers than the program's reach the tests.
        """
        for site in self.sites:
            counts = [(shared.get(place, _NEVER)[0], apart.get(place, _NEVER)[0]) for place in map(self.places.__getitem__, site.parts)]
            parts = {part for part, count in zip(site.parts, counts, strict=True) if any(count)} - self._fixed
            differ = {part for part in parts if not self._is_same(part, shared, apart)}
            given = {part for part in parts for each in walk(part) if each in self._open and self._is_given(each, shared, apart, other)}
            given |= {part for part in parts if names_of(part) & self._caught}
            if site.is_check:
                if any(one < two for one, two in counts):
                    return "the program changed an argument, and so ended a check"
            elif site.is_comparison:
                if len(parts) > 1 and differ and differ | given == parts and not self._fixed.intersection(site.parts):
                    return _DECIDED
            elif differ - given - self._from_program and (given or site.rules_given):
                return _DECIDED
        return ""

    def _is_same(self, part: Any, *runs: Record) -> bool:
        pairs = [[run.get(place, _NEVER) for run in runs] for place in (self.places[part], f"{self.places[part]}'")]
        return all(one == other or one[2] == other[2] != 0 for one, other in pairs)

    def _is_given(self, part: Any, shared: Record, apart: Record, other: Record) -> bool:
        """True if a part depends on the program's answers, or is not there when they fail."""
        is_lost = self.places[part] in shared and not all(self.places[part] in run for run in (apart, other))
        return is_lost or not self._is_same(part, apart, other)


def _caught(tree: ast.Module, flow: Flow) -> Names:
    """Names whose values say whether the program raised an exception: assigned where one is caught, or of functions that return there."""
    caught = [node for node in walk(tree) if isinstance(node, ast.Try | ast.With) and any(names_in(each, flow) for each in node.body)]
    caught = [node for node in caught if isinstance(node, ast.Try) or any(is_error for is_error, _ in class_uses(*node.items))]
    returns = [each.scope.name for node in caught for each in walk(node) if isinstance(each, ast.Return)]  # type: ignore[attr-defined]
    return frozenset(names_stored(*caught)) | {*returns}


def _counted(tree: ast.Module) -> Names:
    """Names of numbers that are known, although the program may have given them: of ranges, and compared for equality."""
    ranges = {loop.target for loop in walk(tree) if isinstance(loop, ast.For | ast.comprehension) and called(loop.iter) == "range"}
    equals = [node for node in walk(tree) if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq)]
    return names_of(*ranges, *(part for node in equals for part in (node.left, *node.comparators) if isinstance(part, ast.Name)))


def _sites(tree: ast.Module, flow: Flow) -> Iterator[Site]:
    checks = [*checks_in(tree)]
    yield from (Site([check], False, True) for check in checks)
    decided, counted = {node for check in checks for node in walk(check)}, _counted(tree)
    negated = {node.operand for node in walk(tree) if isinstance(node, ast.UnaryOp)}
    negated |= {node.test for node in walk(tree) if isinstance(node, ast.If | ast.While) and any(map(raises, node.body))}
    for node in walk(tree):
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) != (node in negated) and _decides(node, decided):
            yield Site([*node.values], False)
        elif isinstance(node, ast.Subscript) and node in decided and not isinstance(node.slice, ast.Slice | ast.Tuple):
            yield from [] if getattr(node.slice, "id", "") in counted else [Site([node.value, node.slice], False)]
        elif isinstance(node, ast.stmt | ast.IfExp):
            yield from _sites_of_statement(node, flow)
        else:
            yield from _sites_of_operation(node, flow)


def _sites_of_statement(node: Any, flow: Flow) -> Iterator[Site]:
    if isinstance(node, ast.If | ast.While) and not any(map(raises, node.body)):
        ruled = checks_in(*node.body, *node.orelse)
        yield Site([node.test], False, rules_given=any(names_in(check, flow) for check in ruled))
    elif isinstance(node, ast.For) and any(names_in(check, flow) for check in checks_in(*node.body)):
        yield Site([node.iter], False, rules_given=True)
    elif isinstance(node, ast.IfExp):
        yield Site([node.test, node.body, node.orelse], False)
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Sub | ast.BitXor):
        yield Site([node.value], False, rules_given=bool(names_in(node.target, flow)))


def _sites_of_operation(node: ast.AST, flow: Flow) -> Iterator[Site]:
    if isinstance(node, ast.Compare):
        pairs = zip(itertools.pairwise([node.left, *node.comparators]), node.ops, strict=True)
        yield from (Site([*pair], True) for pair, how in pairs if not (isinstance(how, ast.Is | ast.IsNot) and _says_which(pair, flow)))
    elif isinstance(node, ast.Set):
        yield Site([*node.elts], True)
    elif called(node) in ("set", "frozenset", "Counter") and isinstance(part := (node.args or [node])[0], ast.List | ast.Tuple):  # type: ignore[attr-defined]
        yield Site([*part.elts], True)
    elif isinstance(node, ast.BinOp):
        yield Site([node.left, node.right], isinstance(node.op, ast.Sub | ast.BitXor))
    elif isinstance(node, ast.Call) and called(node) not in _PUTTING:
        yield from _sites_of_call(node, flow)


_NO_SIDES = frozenset("msg err_msg rtol atol rel_tol abs_tol places delta decimal key default verbose equal_nan axis start".split())
"""Keywords of what is no side of a comparison."""
_PUTTING = {*CHANGING} - {"subtract"}
"""Functions and methods that put their arguments somewhere, and compare nothing."""
_TWO_SIDES = ("allclose", "isclose")
"""Functions whose further arguments are no sides."""


def _says_which(pair: tuple[ast.expr, ast.expr], flow: Flow) -> bool:
    """True for the sides of ``f(a) is a`` and ``f(a) is None``: what the object holds is checked elsewhere, or is nothing."""
    is_plain = [isinstance(each, ast.Name) or (isinstance(each, ast.Call) and bool(names_in(each.func, flow))) for each in pair]
    return all(is_plain) or any(isinstance(each, ast.Constant) for each in pair)


def _decides(node: ast.AST, decided: set[ast.AST]) -> bool:
    return node in decided or any(isinstance(inner, ast.Compare | ast.Not) for inner in walk(node))


def _sites_of_call(node: ast.Call, flow: Flow) -> Iterator[Site]:
    """Sites of a call of another function than the program's: the object of a method and the arguments. An object of the program stays
    the same, and so says that its method compares nothing."""
    is_check, is_method = is_assertion(node, set()), isinstance(node.func, ast.Attribute)
    function = node.func.func if isinstance(node.func, ast.Call) else node.func  # partial(eq, x)(y)
    if (is_method or not names_in(function, flow)) and not any(isinstance(part, ast.Starred) for part in node.args):
        base = [getattr(node.func, "value", None)] if is_method and not is_check else getattr(node.func, "args", [])
        named = [word.value for word in node.keywords if word.arg not in _NO_SIDES]
        given = node.args[:2] if is_check or called(node) in _TWO_SIDES else node.args
        fixed = [part for part in (*base, *given, *named) if _is_fixed(part)]
        parts = [part for part in (*base, *given, *named) if part not in fixed]
        yield from [Site(parts, True)] if len(parts) > 1 and not (is_check and fixed) else []


# ----------------------------------------------------------------------------------------------------- known before any run


def _is_fixed(node: ast.AST) -> bool:
    """True for an expression of literals and built-in functions that call no other."""
    calls = [each for each in walk(node) if isinstance(each, ast.Call)]
    return not names_loaded(node) and all(getattr(call.func, "id", "") not in _IMPURE and not call.keywords for call in calls)


def _is_plain(node: ast.AST) -> bool:
    calls: list[Any] = [each.func for each in walk(node) if isinstance(each, ast.Call)]
    is_pure = all(isinstance(each, ast.Name) and is_builtin(each) and each.id not in _IMPURE for each in calls)
    return is_pure and not any(isinstance(each, ast.NamedExpr | ast.Yield | ast.YieldFrom | ast.Await) for each in walk(node))


_IMPURE = set("open input eval exec next iter vars locals globals getattr setattr map filter".split())
