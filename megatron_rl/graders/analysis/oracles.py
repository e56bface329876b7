"""Finds tests whose verdict a function of the program would decide: an oracle that nothing else pins. Pure, on source trees.

``assert f(2) == reference(2)`` and ``assert is_valid(f(2))`` hold for any program that defines both names to agree. A name is
pinned if some check compares it, and no other name of the program, with what the tests know; or in a round trip
(``decode(encode(x)) == x``).
"""

import ast
from collections.abc import Iterable, Iterator
from typing import Any

from megatron_rl.graders.analysis.blind_spots import NARROW
from megatron_rl.graders.analysis.sides import Sides
from megatron_rl.graders.analysis.value_flow import (
    ANYWHERE,
    Flow,
    Names,
    called,
    checks_in,
    class_uses,
    edges_of,
    edges_of_arguments,
    flow_of,
    functions_of,
    imported_from_solution,
    is_class,
    mark_scopes,
    names_in,
    names_loaded,
    names_of,
    position,
    walk,
)

_SPREADING = frozenset("allclose isclose assert_allclose assert_almost_equal assert_array_almost_equal assert_array_equal".split())
"""Comparisons of numpy that spread their sides to one shape."""
_FORMATS = ("format", "format_map", "substitute", "safe_substitute")
_CONVERSIONS = ("astype", "view", "array", "asarray", "int8", "uint8", "int16", "uint16", "float16", "half")
"""Functions that convert numbers to types in which large ones wrap or round."""


class Oracles:
    """Origins of the values that tests compare.

    Args:
        program: Names that the tests use from the program, besides those that they import from ``solution``.
    """

    def __init__(self, tree: ast.Module, program: Iterable[str]) -> None:
        mark_scopes(tree)
        self._tree, self._edges, of_arguments = tree, [*edges_of(tree)], [*edges_of_arguments(tree)]
        self._program = {*program, *imported_from_solution(tree)}
        self._flow = flow_of(self._edges, self._program)
        if of_arguments:
            outer = [name for name, function in functions_of(tree).items() if function.scope is tree]  # type: ignore[union-attr]
            through = [name for name in outer if not any(self._flow.get(name, {}).values())]
            self._edges += of_arguments
            self._flow = flow_of(self._edges, self._program, through)

    def forget(self, names: Iterable[str]) -> None:
        """``names`` are not the program's after all."""
        self._program -= {*names}
        kept = {name: {place: own & self._program for place, own in sites.items()} for name, sites in self._flow.items()}
        self._flow = Flow(kept, self._flow.through)

    def unpinned(self, entry_point: str) -> str:
        """A name of the program that decides a check of another name, and that no check pins; or if only weak checks pin both. "" if
        there is none.

        Args:
            entry_point: The tested function if the data name it: pinned.
        """
        together = [frozenset().union(*names) for _, names in self._all_groups() if len(names) > 1]
        errors = names_of(*(node for is_error, node in class_uses(self._tree) if is_error))
        weakly, pinned = {entry_point, "candidate", *errors}, {entry_point, "candidate", *errors}
        checks = [part for check in checks_in(self._tree) for part in (check.values if isinstance(check, ast.BoolOp) else [check])]
        for check in checks:
            own = {name for names in _groups(check, self._flow) if len(names) == 1 for each in names for name in each}
            weakly |= own
            pinned |= own if not _is_weak(check) else set()
        suspects = [name for names in together if len(names) > 1 for name in names - weakly or (names if not names & pinned else ())]
        return min(suspects, default="")

    def checked_alone(self) -> tuple[Names, Names]:
        """Names of the program that some check is about, and about no other name of it; and those of them that it mentions."""
        alone = [(own, name) for own, names in self._all_groups() if len(names) == 1 for name in names if len(name) == 1]
        return frozenset().union(*(name for _, name in alone)), frozenset().union(*(own & name for own, name in alone))

    def sides(self) -> Sides:
        return Sides(self._tree, self._flow)

    def loops_to_watch(self) -> dict[ast.For | ast.comprehension, list[ast.expr]]:
        """Loops over what the program gives that check, with the names of what their checks go through at the same time."""
        inside: dict[ast.For | ast.comprehension, list[ast.expr]] = {}
        for node in walk(self._tree):
            if isinstance(node, ast.For):
                inside[node] = list(checks_in(*node.body))
            elif called(node) in ("all", "any"):
                loops = [part for part in node.args if isinstance(part, ast.GeneratorExp | ast.ListComp)]  # type: ignore[attr-defined]
                inside |= {part.generators[0]: [part.elt] for part in loops}
        found: dict[ast.For | ast.comprehension, list[ast.expr]] = {}
        for loop, checks in inside.items():
            if checks and names_in(loop.iter, self._flow):
                bound = names_of(loop.target)
                found[loop] = []
                for sides in map(_sides_of, walk(*checks)):
                    given = [side for side in sides if names_in(side.value if isinstance(side, ast.Subscript) else side, self._flow)]
                    items = [side for side in sides if given and isinstance(side, ast.Subscript) and isinstance(side.value, ast.Name)]
                    chosen = [item.value for item in items if getattr(item.slice, "id", "") in bound]
                    found[loop] += [each for each in chosen if not names_in(each, self._flow)]
        return found

    def decides(self, node: ast.AST) -> bool:
        """True if the value of an expression depends on what the program gives."""
        return bool(names_in(node, self._flow))

    def compares_sums(self) -> bool:
        """True if a check compares a sum or difference of what the program gives with what it gives (``f(a) == before + 1``)."""
        for check in checks_in(self._tree):
            for node in walk(check):
                parts = _sides_of(node)
                sums = [each for each in walk(*parts) if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Add | ast.Sub)]
                if sums and len(parts) > 1 and all(names_in(part, self._flow) for part in parts):
                    return True
        return False

    def conversions(self) -> str:
        """A way in which the tests convert what the program gives, so that it may become anything; "" if there is none."""
        for node in walk(self._tree):
            source: ast.AST | None = None
            values: list[Any] = [node]
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                source, values = node.left, [part for part in self._sources(node.right) if isinstance(part, ast.Dict | ast.Tuple)]
            elif isinstance(node, ast.Call) and called(node) in _FORMATS and isinstance(node.func, ast.Attribute):
                source, values = node.func.value, [*node.args, *(word.value for word in node.keywords)]
            elif isinstance(node, ast.Call) and called(node) in _CONVERSIONS and NARROW.search(ast.unparse(node)):
                source = None if names_in(node.func, self._flow) and not isinstance(node.func, ast.Attribute) else node
            if source and names_in(source, self._flow) and not all(isinstance(value, ast.Constant) for value in values):
                return ast.unparse(node)
        return ""

    def _sources(self, node: ast.AST) -> list[ast.AST]:
        """An expression, or all that the tests assign to a name."""
        return [source for name, _, source in self._edges if name == getattr(node, "id", None)] or [node]

    def zips_to_watch(self) -> list[ast.Call]:
        """Calls of ``zip``, and ``map`` over several iterables, for what the program gives, or a parameter, with something else:
        their lengths must agree."""
        parameters = {each.arg for each in walk(self._tree) if isinstance(each, ast.arg)}
        found = []
        for node in walk(self._tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("zip", "map") and not node.keywords:
                operands = node.args[node.func.id == "map" :]  # type: ignore[attr-defined]
                wholes = {ast.dump(each.value if isinstance(each, ast.Subscript) else each) for each in operands}  # zip(x, x[1:])
                is_given = any(names_loaded(part) & parameters or names_in(part, self._flow) for part in operands)
                if is_given and len(wholes) == len(operands) and not any(isinstance(each, ast.Starred) for each in operands):
                    found.append(node)
        return found

    def arrays_to_watch(self) -> dict[ast.expr, tuple[tuple[int, int, bool], bool]]:
        """Sides of comparisons, of what the program gives with what it does not know, whose shapes must agree: numpy spreads one row over
        many. Maps each to its site and whether the program gives it."""
        found: dict[ast.expr, tuple[tuple[int, int, bool], bool]] = {}
        for node in walk(self._tree):
            is_call = called(node) in _SPREADING
            if is_call or isinstance(getattr(node, "op", None), ast.Sub) or isinstance(getattr(node, "ops", [None])[0], ast.Eq):
                parts = [node.left, node.right] if isinstance(node, ast.BinOp) else _sides_of(node)[:2]
                given = [part for part in parts if names_in(part, self._flow)]
                wanted = names_of(*(part for part in parts if part not in given)) - {"np", "numpy"}
                if len(given) == 1 == len(parts) - 1 and not wanted & names_of(*given):  # not x - f(x)
                    found |= {part: ((*position(node), is_call), part in given) for part in parts}
        return found

    def _all_groups(self) -> list[tuple[Names, set[Names]]]:
        """(names that the check mentions, sets of the program's names on its sides) for each comparison."""
        checks = list(checks_in(self._tree))
        return [(names_loaded(expression), names) for expression in checks for names in _groups(expression, self._flow)]


def _sides_of(node: ast.AST) -> list[ast.expr]:
    """Operands of a comparison, or arguments of a call; none of ``in``."""
    if isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.In | ast.NotIn):
        return [node.left, *node.comparators]
    return node.args if isinstance(node, ast.Call) else []


def _is_weak(check: ast.expr) -> bool:
    """True for a truth, a limit or a length: a function that judges passes many of them."""
    if isinstance(check, ast.UnaryOp | ast.GeneratorExp | ast.ListComp):
        return _is_weak(check.operand if isinstance(check, ast.UnaryOp) else check.elt)
    if isinstance(check, ast.Compare):
        truths = [part for part in check.comparators if isinstance(part, ast.Constant) and isinstance(part.value, bool | None)]
        return bool(truths) or called(check.left) == "len" or isinstance(check.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
    if isinstance(check, ast.Call) and len(check.args) == 1 and isinstance(check.args[0], ast.Compare | ast.GeneratorExp | ast.ListComp):
        return _is_weak(check.args[0])
    return isinstance(check, ast.Call) and (len(check.args) < 2 or called(check).startswith(("assertGreater", "assertLess")))


def _groups(node: ast.expr, flow: Flow) -> Iterator[set[Names]]:
    if isinstance(node, ast.BoolOp | ast.UnaryOp):
        for part in node.values if isinstance(node, ast.BoolOp) else [node.operand]:
            yield from _groups(part, flow)
    elif isinstance(node, ast.GeneratorExp | ast.ListComp):
        yield from _groups(node.elt, flow)
    elif isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
        if all(names_in(part, flow) for part in parts):
            yield _sides(parts, flow)
        else:  # all are compared with a value of the tests
            is_limit = isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
            known = [part for part in parts if not names_in(part, flow)]
            for part in parts:
                yield _alone(part, flow, [] if is_limit else known)
    elif isinstance(node, ast.Call):
        yield from _groups_of_call(node, flow)
    else:
        yield _alone(node, flow, [])


def _alone(node: ast.expr, flow: Flow, others: list[ast.expr]) -> set[Names]:
    """Each name of an expression on its own side, unless it equals one of ``others`` that no program could guess, or that the
    program's functions get in a round trip."""
    names = names_in(node, flow)
    calls = [call for call in walk(node) if isinstance(call, ast.Call)]
    given = {ast.dump(argument).lower() for call in calls if names_in(call.func, flow) for argument in call.args}
    counts = any(getattr(call.func, "id", "") in ("sum", "len") for call in calls)
    is_whole = any(ast.dump(other).lower() in given or not (_is_simple(other) or counts) for other in others)
    return {names} if is_whole else {frozenset({name}) for name in names}


def _is_simple(node: ast.expr) -> bool:
    """True for text, True, None, numbers like 0 and 1, and empty or equal containers: what a function returns that judges."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return all(map(_is_simple, node.elts))
    if isinstance(node, ast.Dict) or (isinstance(node, ast.Call) and not node.args):
        return not isinstance(node, ast.Dict) or not node.keys
    return isinstance(node, ast.Constant) and (isinstance(node.value, str) or not node.value or node.value == 1)


def _groups_of_call(node: ast.Call, flow: Flow) -> Iterator[set[Names]]:
    inner = [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
    parts = [part for part in inner if isinstance(part, ast.Compare | ast.BoolOp | ast.GeneratorExp | ast.ListComp)]
    name = getattr(node.func, "attr" if getattr(inner[-1] if inner else None, "id", "") == "solution" else "id", "")
    own = frozenset({name}) & flow.get(name, {}).get(ANYWHERE, set())
    if parts:
        for part in parts:
            yield from _groups(part, flow)
    elif own and not is_class(name):  # the program's function decides: about other names than its own?
        others = {other for part in inner for other in names_in(part, flow) if not is_class(other)} - own
        yield {own, frozenset(others)} if others else {own}
    elif node.args and (len(inner) == 1 or getattr(node.func, "attr", "") in ("assertTrue", "assertFalse")):
        yield from _groups(node.args[0], flow)
    else:
        yield _sides([*inner, *(word.value for word in node.keywords)], flow)


def _sides(parts: Iterable[ast.AST], flow: Flow) -> set[Names]:
    return {frozenset({own}) if own else names for part in parts if (names := names_in(part, flow)) for own in [_own_value(part, names)]}


def _own_value(node: ast.AST, names: Names) -> str:
    """The attribute of a function of the program that an expression reads (``f.want``), which the program chose; or ""."""
    base = getattr(node.value, "id", "") if isinstance(node, ast.Attribute) else ""
    return f"{base}.{node.attr}" if base in names and not is_class(base) else ""  # type: ignore[attr-defined]
