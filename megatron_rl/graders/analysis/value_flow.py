"""Origins of the values of tests, and the expressions that decide. Pure, on source trees.

A flow is an over-approximation: a name depends on all names of the program from which a value may reach it, by the last assignment before
the use in its scope, or else by any.
"""

import ast
import builtins
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Any

Names = frozenset[str]
Edge = tuple[str, Any, ast.AST]
"""(name, place of an assignment, expression): a value of the expression may reach the name."""


class Flow(dict[str, dict[Any, set[str]]]):
    """For each name of the tests and place of an assignment, the names of the program that the value depends on."""

    def __init__(self, sites: dict[str, dict[Any, set[str]]], through: Collection[str] = ()) -> None:
        super().__init__(sites)
        self.through = through
        self.names: dict[ast.AST, Names] = {}
        """Results of ``names_in``."""
        self._read: dict[ast.AST, list[set[str]]] = {}
        self._positions: dict[tuple[str, ast.AST], list[tuple[int, int]]] = defaultdict(list)
        for name, places in sites.items():
            for scope, position in sorted((each for each in places if each != ANYWHERE), key=lambda place: place[1]):
                self._positions[name, scope].append(position)

    def read_by(self, node: ast.AST) -> list[set[str]]:
        """Sets of names of the program that an expression depends on; they grow until the flow is complete."""
        if node in self._read:
            return self._read[node]
        found = self._read[node] = []
        waiting = [node]
        while waiting:
            inner = waiting.pop()
            is_call = isinstance(inner, ast.Call)  # a function that is given away is not called here
            skipped = inner.func if _called_function(inner) in self.through else None  # type: ignore[attr-defined]
            waiting += [part for part in _parts(inner) if part is not skipped and not (is_call and isinstance(part, ast.Lambda))]
            if isinstance(inner, ast.Attribute) and getattr(inner.value, "id", "") == "solution":
                found.append({inner.attr})
            for name in (own, f"self.{own}") if (own := _own_attribute(inner)) else ():
                found += [self[name][ANYWHERE]] if ANYWHERE in self.get(name, {}) else []
            if isinstance(inner, ast.Name) and not is_builtin(inner):
                found += [self[inner.id][site] for site in self._sites(inner)]
        return found

    def _sites(self, name: Any) -> list[Any]:
        """Places of the assignments from which a name may have its value."""
        scope, every = name.scope, self.get(name.id, {})
        own = self._positions.get((name.id, scope), ())
        last = bisect_left(own, position(name))
        if last:
            first = next((number for number in range(last - 1, 0, -1) if own[number] in _unconditional(scope)), 0)
            return [(scope, each) for each in own[first:last]]
        return [site for site in every if site == ANYWHERE or site[0] is not scope] or [*every]


def _unconditional(scope: Any) -> set[tuple[int, int]]:
    """Places of the assignments of a function or module that stand in no other statement."""
    if "unconditional" not in vars(scope):
        body = scope.body if isinstance(scope.body, list) else []
        plain = [node for node in body if isinstance(node, ast.Assign | ast.AnnAssign)]
        scope.unconditional = {(node.end_lineno, node.end_col_offset) for node in plain} | {*map(position, plain)}
    return scope.unconditional


_BUILTINS = frozenset(dir(builtins))
ASSERTIONS = ("assert", "check", "compare", "ensure", "expect", "require", "validate", "verify")
"""Beginnings of the names of functions that are called to fail."""
_CHANGES = tuple("add append appendleft extend extendleft insert setdefault update put put_nowait push write writelines subtract".split())
"""Methods that put their arguments into their object."""
_CHANGING = ("heappush", "insort", "insort_left", "insort_right", "setattr", "setitem")
"""Functions that put their further arguments into the first."""
CHANGING = (*_CHANGES, *_CHANGING)
_SELF = ("self", "cls")
ANYWHERE = (0, 0)
"""Position of what a parameter, a function or the program gives."""


def walk(*trees: ast.AST) -> list[ast.AST]:
    """All nodes of trees; each tree keeps its list, because it is walked many times before anything changes it."""
    found: list[ast.AST] = []
    for tree in trees:
        if "nodes" not in vars(tree):
            tree.nodes = [*ast.walk(tree)]  # type: ignore[attr-defined]
        found += tree.nodes  # type: ignore[attr-defined]
    return found


def flow_of(edges: list[Edge], program: set[str], through: Collection[str] = ()) -> Flow:
    """The flow of the names of the program.

    Args:
        through: Functions of the tests whose results depend on their arguments alone.
    """
    sites: dict[str, dict[Any, set[str]]] = {name: {ANYWHERE: {name}} for name in program}
    for name, place, _ in edges:
        sites.setdefault(name, {}).setdefault(place, set())
    flow = Flow(sites, through)
    size = -1
    while size != (size := sum(len(names) for places in sites.values() for names in places.values())):
        for name, place, source in edges:
            flow[name][place].update(*flow.read_by(source))
    return flow


def mark_scopes(tree: ast.AST) -> None:
    """Give each node its ``scope``. Names that the tests bind are no built-ins."""
    waiting = [(tree, tree)]
    while waiting:
        node, scope = waiting.pop()
        node.scope = scope  # type: ignore[attr-defined]
        inner = node if isinstance(node, ast.FunctionDef | ast.Lambda) else scope
        waiting += [(child, inner) for child in ast.iter_child_nodes(node)]
    bound = names_stored(tree) | {node.arg for node in walk(tree) if isinstance(node, ast.arg)}
    for name in walk(tree):
        name.is_own = getattr(name, "id", "") in bound  # type: ignore[attr-defined]


def scope_of(node: ast.AST) -> ast.AST:
    """The function or module in which an expression runs, or in which the lambda around it is made."""
    scope = node.scope  # type: ignore[attr-defined]
    return scope_of(scope) if isinstance(scope, ast.Lambda) else scope


def edges_of(tree: ast.Module) -> Iterator[Edge]:
    """Assignments, and what functions return."""
    for name, own in functions_of(tree).items():
        returned = [node for node in walk(own) if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) and node.value]
        yield from ((name, ANYWHERE, node.value) for node in returned if node.value)
    for node in walk(tree):
        for target, source in assigned(node):
            yield from ((f"self.{name}", ANYWHERE, source) for each in walk(target) if (name := _own_attribute(each)))
            names: list[Any] = [inner for inner in walk(target) if isinstance(inner, ast.Name) and inner.id not in _SELF]
            place = (node.end_lineno, node.end_col_offset) if isinstance(node, ast.Assign) else position(node)  # x = g(x) reads x before
            yield from ((each.id, (scope_of(each), place), source) for each in names)
            if isinstance(node, ast.AugAssign | ast.Call) or isinstance(target, ast.Attribute | ast.Subscript):  # the value before stays
                yield from ((each.id, (scope_of(each), place), each) for each in names)


def edges_of_arguments(tree: ast.Module) -> Iterator[Edge]:
    """Arguments of the tests' own functions."""
    functions = functions_of(tree)
    for node in walk(tree):
        if isinstance(node, ast.Call) and (function := callee(node, functions)):
            yield from ((name, ANYWHERE, value) for name, value in _pairs(node, function))


def _pairs(call: ast.Call, function: ast.FunctionDef | ast.Lambda) -> Iterator[tuple[str, ast.expr]]:
    """(parameter, argument) of a call of one of the tests' functions."""
    own = function.args
    parameters = [each.arg for each in (*own.posonlyargs, *own.args)][isinstance(call.func, ast.Attribute) :]
    yield from zip(parameters, call.args, strict=False)
    yield from ((word.arg, word.value) for word in call.keywords if word.arg)


def functions_of(tree: ast.Module) -> dict[str, ast.FunctionDef | ast.Lambda]:
    """Functions of the tests by name."""
    found: dict[str, ast.FunctionDef | ast.Lambda] = {node.name: node for node in walk(tree) if isinstance(node, ast.FunctionDef)}
    named = [(target, source) for node in walk(tree) for target, source in assigned(node) if isinstance(source, ast.Lambda)]
    return found | {target.id: source for target, source in named if isinstance(target, ast.Name)}


def callee(call: ast.Call, functions: dict[str, ast.FunctionDef | ast.Lambda]) -> ast.FunctionDef | ast.Lambda | None:
    """The function of the tests that is called."""
    return call.func if isinstance(call.func, ast.Lambda) else functions.get(_called_function(call) or called(call))


def _called_function(node: ast.AST) -> str:
    """Name of the function, or of the method of ``self``, that an expression calls; "" for other expressions."""
    function = getattr(node, "func", None)
    return _own_attribute(function) or getattr(function, "id", "")


def assigned(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """(target, expression whose value it gets) for each assignment of a statement, loop or call."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _unpacked(target, node.value, getattr(node.value, "elts", []))
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value:
        yield node.target, node.value
    elif isinstance(node, ast.For | ast.comprehension):
        yield from _unpacked(node.target, node.iter, node.iter.args if called(node.iter) == "zip" else [])  # type: ignore[attr-defined]
    elif isinstance(node, ast.withitem) and node.optional_vars:
        yield node.optional_vars, node.context_expr
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
        yield from ((node.func.value, argument) for argument in node.args)
    elif called(node) in _CHANGING:
        yield from ((node.args[0], argument) for argument in node.args[1:])  # type: ignore[attr-defined]


def _unpacked(target: ast.AST, source: ast.AST, parts: list[ast.AST]) -> Iterable[tuple[ast.AST, ast.AST]]:
    """Pairs of a tuple of targets with the parts of the source, if there are as many."""
    targets = target.elts if isinstance(target, ast.Tuple) else []
    return zip(targets, parts, strict=True) if targets and len(targets) == len(parts) else [(target, source)]


def position(node: Any) -> tuple[int, int]:
    node = node.target if isinstance(node, ast.comprehension) else node
    node = node.optional_vars if isinstance(node, ast.withitem) else node
    return (node.lineno, node.col_offset)


def _own_attribute(node: Any) -> str:
    """Name of the attribute or method that ``self.name`` is; "" for other expressions."""
    return node.attr if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in _SELF else ""


def _parts(node: ast.AST) -> Iterable[ast.AST]:
    return () if _own_attribute(node) else ast.iter_child_nodes(node)


def names_in(node: ast.AST, flow: Flow) -> Names:
    """Names of the program that an expression depends on, without classes if there are other names: by the last assignment before it in
    its scope, or else by all."""
    if node not in flow.names:
        found: Names = frozenset().union(*flow.read_by(node))
        flow.names[node] = frozenset(name for name in found if not is_class(name)) or found
    return flow.names[node]


def is_class(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def names_of(*nodes: ast.AST) -> Names:
    return frozenset(inner.id for inner in walk(*nodes) if isinstance(inner, ast.Name))


def names_loaded(node: ast.AST) -> Names:
    """Names that an expression reads and does not bind itself."""
    return frozenset(each.id for each in walk(node) if isinstance(each, ast.Name) and not is_builtin(each)) - names_stored(node)


def is_builtin(name: ast.Name) -> bool:
    return name.id in _BUILTINS and not getattr(name, "is_own", False)


def names_stored(*nodes: ast.AST) -> set[str]:
    """Names that statements or expressions assign."""
    return {each.id for each in walk(*nodes) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def called(node: ast.AST) -> str:
    """Name of the function or method that an expression calls; "" if it is no call."""
    function = getattr(node, "func", None)
    return getattr(function, "attr", getattr(function, "id", ""))


def checks_in(*trees: ast.AST) -> Iterator[ast.expr]:
    """Expressions that decide: asserted, compared, or the condition of an error. Functions of the tests have their own."""
    own = {node.name for node in walk(*trees) if isinstance(node, ast.FunctionDef)}
    for node in walk(*trees):
        if isinstance(node, ast.Assert):
            yield node.test
        elif isinstance(node, ast.Expr) and (isinstance(node.value, ast.Compare) or is_assertion(node.value, own)):
            yield node.value
        elif isinstance(node, ast.If | ast.While) and any(map(raises, node.body)):
            yield node.test


def raises(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Raise) for inner in walk(node))


def is_assertion(node: ast.expr, own: set[str]) -> bool:
    name = called(node)
    return name not in own and name.lstrip("_").lower().startswith(ASSERTIONS)


def imported_from_solution(tree: ast.AST) -> set[str]:
    imports = [node for node in walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "solution"]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def identifiers(tree: ast.AST) -> set[str]:
    """Names, attributes, imports, modules and parameters; ``await`` represents any asynchronous code."""
    found: set[str] = set()
    for node in walk(tree):
        if isinstance(node, (ast.Await, ast.AsyncFunctionDef)):
            found.add("await")
        elif isinstance(node, ast.alias | ast.ImportFrom):
            found |= set((getattr(node, "name", None) or getattr(node, "module", None) or "").split("."))
        else:
            found |= {value for key in ("id", "attr", "arg") if isinstance(value := getattr(node, key, None), str)}
    return found


def class_uses(*trees: ast.AST) -> Iterator[tuple[bool, ast.AST]]:
    """Yield (is_exception, expression) for each expression that tests use as a class, as in ``isinstance``."""
    for node in walk(*trees):
        if isinstance(node, ast.ExceptHandler):
            yield True, node.type or ast.Constant(None)
        elif isinstance(node, ast.ClassDef):
            yield from ((False, base) for base in node.bases)
        elif called(node) in ("raises", "assertRaises", "assertRaisesRegex", "suppress"):
            yield from ((True, argument) for argument in node.args[:1])  # type: ignore[attr-defined]
        elif called(node) == "assertEqual" or isinstance(node, ast.Compare):
            sides: list[Any] = [node.left, *node.comparators] if isinstance(node, ast.Compare) else node.args[:2]  # type: ignore[attr-defined]
            types = [ast.unparse(side) for side in sides if called(side) == "type"]
            if any(re.fullmatch(r"type\((\w+\.exception|(e|err|exc)\w*\.value)\)", text) for text in types):
                yield from ((True, side) for side in sides if isinstance(side, ast.Name))
        elif called(node) in ("isinstance", "issubclass", "assertIsInstance", "assertNotIsInstance"):
            yield from ((False, argument) for argument in node.args[called(node) != "issubclass" :])  # type: ignore[attr-defined]
