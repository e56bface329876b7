"""Decides whether tests hold only by what the program has changed: its arguments, iterators that it was given, or files.

``f(a) == sorted(a)`` holds for a program that empties ``a`` and returns []. Tests that hold with a program that changed something
are run twice more: with results as they were when the program gave them, so that only changes of arguments reach the tests, and with
copies of the arguments, so that no change does. A side of a comparison whose values differ depends on the changes. It may be what is
tested (``f(a); assert a == [1, 3]``) if another side depends neither on the changes nor on what the program gives.
"""

import ast
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron_rl.graders.analysis.value_flow import (
    FILES,
    Edge,
    Flow,
    Names,
    assigned,
    called,
    checks_in,
    flow_of,
    is_assertion,
    may_leave,
    names_in,
    names_loaded,
    names_of,
    raises,
    scope_of,
    walk,
)

Record = dict[str, list[int]]
"""Maps the number of a part to the hash of its values: how many there were, of all, or of the one that all are."""


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
        edges, flow: Of the tests, where ``program`` are the names of the program.
    """

    def __init__(self, tree: ast.Module, edges: list[Edge], flow: Flow, program: set[str]) -> None:
        counted = _counted(tree)
        self.sites = [*_sites(tree, flow, counted)]
        self.places = {part: str(number) for number, part in enumerate(part for site in self.sites for part in site.parts)}
        """Maps each part to its key in a record."""
        parts, by_files = self.places.keys(), _flow_of_files(tree, edges, flow, program)
        loops = [node for node in walk(tree) if isinstance(node, ast.For) and names_in(node.iter, flow)]
        turns = names_of(*(each.target for loop in loops for each in walk(loop) if isinstance(each, ast.AugAssign)))
        self._given = {part for part in parts if _is_given(_without_index(part, counted), flow, turns)}
        self._fixed = set(filter(_is_fixed, parts))
        self._of_files = {part for part in parts if names_in(part, by_files)} - self._given
        steers = (ast.For, ast.While, ast.If, ast.comprehension, ast.BoolOp, ast.IfExp)
        self.are_fixed = all(map(self._is_safe, self.sites)) and not any(isinstance(node, steers) for node in walk(tree))
        """True if literals decide every check."""

    def _is_safe(self, site: Site) -> bool:
        """True for parts that no change can decide."""
        if site.is_comparison:
            return bool(self._fixed.intersection(site.parts))
        return site.is_check or self._fixed.issuperset(site.parts) or not self._given.intersection(site.parts)

    def doubt(self, shared: Record, apart: Record, has_changed_files: bool) -> str:
        """The reason why changes may have decided the tests; "" if they have not.

        Args:
            shared: Of the run in which changes reach the tests.
            apart: Of the run in which they do not.
        """
        for site in self.sites:
            pairs = {part: (shared.get(self.places[part], [0] * 3), apart.get(self.places[part], [0] * 3)) for part in site.parts}
            reached = {part: pair for part, pair in pairs.items() if pair[0][0] or pair[1][0]}
            same = {part for part, (one, other) in reached.items() if one == other or one[2] == other[2] != 0}
            differ = reached.keys() - same - self._fixed
            differ |= self._of_files.intersection(site.parts) if has_changed_files else set()
            if site.is_check and any(one[0] < other[0] for one, other in pairs.values()):
                return "the program changed an argument, and so ended a check"
            if not site.is_check and self._is_decided(site, same, differ):
                return "the program changed an argument or a file on which the check of its result depends"
        return ""

    def _is_decided(self, site: Site, same: set[ast.expr], differ: set[ast.expr]) -> bool:
        """True if changes, by which some parts ``differ`` and others are the ``same``, may have decided what a site says."""
        given = self._given.intersection(site.parts)
        if site.is_comparison:
            return bool(differ) and not (same | self._fixed.intersection(site.parts)) - differ - given
        return bool(differ - given) and bool(given or site.rules_given)


def _counted(tree: ast.Module) -> Names:
    """Names of numbers that are known, although the program may have given them: of ranges, and compared for equality."""
    ranges = {loop.target for loop in walk(tree) if isinstance(loop, ast.For | ast.comprehension) and called(loop.iter) == "range"}
    equals = [node for node in walk(tree) if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq)]
    return names_of(*ranges, *(part for node in equals for part in (node.left, *node.comparators) if isinstance(part, ast.Name)))


def _is_given(node: ast.AST, flow: Flow, turns: Names) -> bool:
    return bool(names_in(node, flow) or names_of(node) & turns)


def _without_index(node: ast.expr, counted: Names) -> ast.expr:
    while isinstance(node, ast.Subscript) and getattr(node.slice, "id", "") in counted:
        node = node.value
    return node


def _sites(tree: ast.Module, flow: Flow, counted: Names) -> Iterator[Site]:
    checks = [*checks_in(tree)]
    yield from (Site([check], False, True) for check in checks)
    decided = {node for check in checks for node in walk(check)}
    negated = {node.operand for node in walk(tree) if isinstance(node, ast.UnaryOp)}
    negated |= {node.test for node in walk(tree) if isinstance(node, ast.If | ast.While) and any(map(raises, node.body))}
    for node in walk(tree):
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) != (node in negated) and _decides(node, decided):
            yield Site([*node.values], False)
        elif isinstance(node, ast.Subscript) and node in decided and not isinstance(node.slice, ast.Slice | ast.Tuple):
            yield from [Site([node.value, node.slice], False)] if _without_index(node, counted) is node else []
        elif isinstance(node, ast.stmt | ast.IfExp):
            yield from _sites_of_statement(node, flow)
        else:
            yield from _sites_of_operation(node, flow, is_decided=node in decided)


def _sites_of_statement(node: Any, flow: Flow) -> Iterator[Site]:
    if isinstance(node, ast.If | ast.While) and not any(map(raises, node.body)):
        leaves = isinstance(node, ast.If) and may_leave(node)
        ruled = checks_in(*(node.scope.body if leaves else [*node.body, *node.orelse]))  # type: ignore[union-attr]
        yield Site([node.test], False, rules_given=any(names_in(check, flow) for check in ruled))
    elif isinstance(node, ast.For) and any(names_in(check, flow) for check in checks_in(*node.body)):
        yield Site([node.iter], False, rules_given=True)
    elif isinstance(node, ast.IfExp):
        yield Site([node.test, node.body, node.orelse], False)
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Sub | ast.BitXor):
        yield Site([node.value], False, rules_given=bool(names_in(node.target, flow)))


def _sites_of_operation(node: ast.AST, flow: Flow, *, is_decided: bool) -> Iterator[Site]:
    if isinstance(node, ast.Compare) and not all(isinstance(each, ast.Is | ast.IsNot) for each in node.ops):
        yield from (Site([*pair], True) for pair in itertools.pairwise([node.left, *node.comparators]))
    elif isinstance(node, ast.Set) and (is_decided or len({bool(names_in(part, flow)) for part in node.elts}) > 1):
        yield Site([*node.elts], True)
    elif isinstance(node, ast.BinOp) and (is_decided or names_in(node, flow)):
        yield Site([node.left, node.right], isinstance(node.op, ast.Sub | ast.BitXor))
    elif isinstance(node, ast.Call) and (is_decided or is_assertion(node, set()) or called(node) in _COMPARING):
        yield from _sites_of_call(node, flow)


_NO_SIDES = frozenset("msg err_msg rtol atol rel_tol abs_tol places delta decimal key default verbose equal_nan axis start".split())
"""Keywords of what is no side of a comparison."""
_COMPARING = frozenset(
    "allclose isclose array_equal array_equiv eq ne difference symmetric_difference issubset issuperset isdisjoint subtract divmod ratio "
    "startswith endswith count index SequenceMatcher Counter intersection dist correlation partial".split()
)
"""Functions whose results say how their operands compare, wherever they stand."""
_TWO_SIDES = ("allclose", "isclose")
"""Functions whose further arguments are no sides."""


def _decides(node: ast.AST, decided: set[ast.AST]) -> bool:
    return node in decided or any(isinstance(inner, ast.Compare | ast.Not) for inner in walk(node))


def _sites_of_call(node: ast.Call, flow: Flow) -> Iterator[Site]:
    loops = [part for part in node.args if isinstance(part, ast.GeneratorExp | ast.ListComp)]
    if loops and called(node) in ("all", "any"):
        yield from (Site([each.iter, *each.ifs, loop.elt], False) for loop in loops for each in loop.generators[:1])
    elif not any(isinstance(part, ast.Starred) for part in node.args) and _is_of_library(node, flow):
        is_method = isinstance(node.func, ast.Attribute) and len(node.args) == 1 and not is_assertion(node, set())
        base = [node.func.value] if is_method and not names_of(node.func.value) & FILES else []  # type: ignore[attr-defined]
        named = [word.value for word in node.keywords if word.arg not in _NO_SIDES]
        given = node.args[:2] if is_assertion(node, set()) or called(node) in _TWO_SIDES else node.args
        parts = [part for part in (*base, *given, *named) if not (isinstance(part, ast.Constant) and part.value is None)]
        yield from [Site(parts, True)] if len(parts) > 1 else []


def _is_of_library(node: ast.Call, flow: Flow) -> bool:
    is_comparing = isinstance(node.func, ast.Attribute) and called(node) in _COMPARING
    return is_comparing or is_assertion(node, set()) or not names_in(node.func, flow)


# ----------------------------------------------------------------------------------------------------- known before any run


def _is_fixed(node: ast.AST) -> bool:
    """True for an expression of literals and built-in functions that call no other."""
    calls = [each for each in walk(node) if isinstance(each, ast.Call)]
    return not names_loaded(node) and all(getattr(call.func, "id", "") not in _IMPURE and not call.keywords for call in calls)


_IMPURE = set("open input eval exec next iter vars locals globals getattr setattr map filter".split())


def _is_file_function(node: ast.AST) -> bool:
    """True for ``np.loadtxt``, whose base then stands for files."""
    return isinstance(node, ast.Attribute) and node.attr in FILES and isinstance(node.value, ast.Name)


def _flow_of_files(tree: ast.Module, edges: list[Edge], flow: Flow, program: set[str]) -> Flow:
    """The flow in which each use of the program changes files, and all that the tests have opened."""
    files = set(FILES)
    for node in walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            files |= {each.asname or each.name for each in node.names if (module or each.name).partition(".")[0] in FILES}
        for target, source in assigned(node):
            while isinstance(source, ast.BinOp):  # Path("a") / "b"
                source = source.left
            if called(source) in FILES or getattr(source, "id", "") in files:
                files |= names_of(target)
    files = {*(files & names_of(tree)), *(node.value.id for node in walk(tree) if _is_file_function(node))}  # type: ignore[attr-defined]
    calls: list[Any] = [node for node in walk(tree) if isinstance(node, ast.Call) and names_in(node, flow)] if files else []
    changes = [(name, (scope_of(call), (call.end_lineno, call.end_col_offset)), call) for call in calls for name in files]
    return flow_of([*edges, *changes], program, (), flow.shared) if changes else flow
