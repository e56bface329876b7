"""Finds tests whose verdict a function of the program would decide: an oracle that nothing else pins. Pure, on source trees.

``assert f(2) == reference(2)`` and ``assert is_valid(f(2))`` hold for any program that defines both names to agree. A name is
pinned if some check compares it, and no other name of the program, with what the tests know; or in a round trip
(``decode(encode(x)) == x``).
"""

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

_Names = frozenset[str]
_Position = tuple[int, int]
_Flow = dict[str, dict[Any, set[str]]]
"""For each name of the tests and place of an assignment, the names of the program that the value depends on."""
_Edge = tuple[str, Any, ast.AST]
"""(name, place of an assignment, expression): a value of the expression may reach the name."""
_Gift = tuple[ast.Call, set[str]]
_BUILTINS = frozenset(dir(builtins))
ASSERTIONS = ("assert", "check", "compare", "ensure", "expect", "require", "validate", "verify")
"""Beginnings of the names of functions that are called to fail."""
_CHANGES = ("add", "append", "extend", "insert", "setdefault", "update")
"""Methods that put their arguments into their object."""
_FILES = frozenset({"open", "Path", "os", "pathlib", "glob", "shutil", "filecmp", "linecache"})
"""Names by which tests read files, which the program's functions may change."""
_VIEWS = ("iter", "reversed", "enumerate", "zip", "map", "filter", "islice", "chain", "memoryview", "keys", "values", "items")
"""Functions whose results change with their arguments."""
_FORMATS = ("format", "format_map", "substitute", "safe_substitute")
NARROW = re.compile(r"\b(?:u?int(?:8|16)|float16|half|dtype)\b")
_CONVERSIONS = ("astype", "view", "array", "asarray", "int8", "uint8", "int16", "uint16", "float16", "half")
"""Functions that convert numbers to types in which large ones wrap or round."""
_ANYWHERE = (0, 0)
"""Position of what a parameter, a function or the program gives."""


class Oracles:
    """Origins of the values that tests compare.

    Args:
        program: Names that the tests use from the program, besides those that they import from ``solution``.
    """

    def __init__(self, tree: ast.Module, program: Iterable[str]) -> None:
        _mark_scopes(tree, tree)
        self._tree, self._edges = tree, [*_edges(tree)]
        self._program = {*program, *_imported_from_solution(tree)}
        self._flow = _flow(self._edges, self._program)

    def forget(self, names: Iterable[str]) -> None:
        """``names`` are not the program's after all."""
        self._program -= {*names}
        self._flow = {name: {place: own & self._program for place, own in sites.items()} for name, sites in self._flow.items()}

    def unpinned(self, entry_point: str) -> str:
        """A name of the program that decides a check of another name, and that no check pins; "" if there is none.

        Args:
            entry_point: The tested function if the data name it: pinned.
        """
        groups = [names for _, names in self._all_groups()]
        together = [frozenset().union(*names) for names in groups if len(names) > 1]
        pinned = {entry_point, "candidate"}.union(*(name for names in groups if len(names) == 1 for name in names))
        suspects = sorted(name for names in together if len(names) > 1 for name in names - pinned)
        return suspects[0] if suspects else ""

    def checked_alone(self) -> tuple[_Names, _Names]:
        """Names of the program that some check is about, and about no other name of it; and those of them that it mentions."""
        alone = [(own, name) for own, names in self._all_groups() if len(names) == 1 for name in names if len(name) == 1]
        return frozenset().union(*(name for _, name in alone)), frozenset().union(*(own & name for own, name in alone))

    def changes_that_decide(self) -> frozenset[str]:
        """The kinds of change by which the program may decide a check: "changes" of arguments (``f(a) == sorted(a)``), "files"."""
        names, files = {"candidate", "solution", *self._program}, _files(self._tree)
        gifts = list(_gifts(self._tree, names, self._flow))
        gifts += _gifts_inside(self._tree, gifts)
        changed = {"changes": gifts, "files": [(call, files) for call, _ in gifts if files]}
        flows = {kind: _flow([*self._edges, *_changes(each, names)], self._program) for kind, each in changed.items() if each}
        return frozenset(kind for kind, flow in flows.items() if _rests_on(self._tree, self._flow, flow, changed[kind]))

    def loops_to_watch(self) -> list[ast.For]:
        """Loops with checks over what the program gives."""
        loops = [node for node in ast.walk(self._tree) if isinstance(node, ast.For) and _names(node.iter, self._flow)]
        return [loop for loop in loops if any(_checks(ast.Module(loop.body, [])))]

    def conditions_to_watch(self) -> dict[ast.If, bool]:
        """Conditions that depend on what the program gives, with the value that leads to checks."""
        found = {}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.If) and not node.orelse and _names(node.test, self._flow):
                checks = [*_checks(ast.Module(node.body, []))]
                if _leaves(node) and not checks and any(_checks(ast.Module(node.scope.body, []))):  # type: ignore[attr-defined]
                    found[node] = False
                elif any(not isinstance(check, ast.Constant) for check in checks):  # not of assert False
                    found[node] = True
        return found

    def conversions(self) -> str:
        """A way in which the tests convert what the program gives, so that it may become anything; "" if there is none."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                source, values = node.left, [part for part in self._sources(node.right) if isinstance(part, ast.Dict | ast.Tuple)]
            elif called(node) in _FORMATS and isinstance(node.func, ast.Attribute):
                source, values = node.func.value, [*node.args, *(word.value for word in node.keywords)]
            elif called(node) in _CONVERSIONS and NARROW.search(ast.unparse(node)):
                source, values = node, [node]
            else:
                continue
            if _names(source, self._flow) and not all(isinstance(value, ast.Constant) for value in values):
                return ast.unparse(node)
        return ""

    def _sources(self, node: ast.AST) -> list[ast.AST]:
        """An expression, or all that the tests assign to a name."""
        return [source for name, _, source in self._edges if name == getattr(node, "id", None)] or [node]

    def zips_to_watch(self) -> list[ast.Call]:
        """Calls of ``zip``, and ``map`` over several iterables, for what the program gives, or a parameter, with something else:
        their lengths must agree."""
        parameters = {each.arg for each in ast.walk(self._tree) if isinstance(each, ast.arg)}
        found = []
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("zip", "map") and not node.keywords:
                operands = node.args[node.func.id == "map" :]  # type: ignore[attr-defined]
                wholes = {ast.dump(each.value if isinstance(each, ast.Subscript) else each) for each in operands}  # zip(x, x[1:])
                is_given = any(_loaded(part) & parameters or _names(part, self._flow) for part in operands)
                if is_given and len(wholes) == len(operands) and not any(isinstance(each, ast.Starred) for each in operands):
                    found.append(node)
        return found

    def _all_groups(self) -> list[tuple[_Names, set[_Names]]]:
        """(names that the check mentions, sets of the program's names on its sides) for each comparison."""
        checks = list(_checks(self._tree))
        return [(_loaded(expression), names) for expression in checks for names in _groups(expression, self._flow)]


def _rests_on(tree: ast.Module, flow: _Flow, with_changes: _Flow, gifts: list[_Gift]) -> bool:
    """True if a check knows what is right only from what the program may have changed; or if such a thing says whether a result
    is checked (``f(a) == 4 or not a``), or how often."""
    for condition, ruled in _conditions(tree):
        if _names(condition, with_changes) and not _names(condition, flow) and any(_names(part, flow) for part in ruled):
            return True
    for node in ast.walk(tree):
        if _may_end(node, gifts):
            return True
        parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else getattr(node, "args", ())
        if isinstance(node, ast.Compare) or (isinstance(node, ast.Call) and _is_assertion(node, set())):
            is_known = any(not _names(part, with_changes) for part in parts) or _compares_objects(node)
            if not is_known and any(not _names(part, flow) for part in parts):
                return True
    return False


def _compares_objects(node: ast.AST) -> bool:
    """True for ``a is b``, which no change of an object decides."""
    parts = [node.left, *node.comparators, *node.ops] if isinstance(node, ast.Compare) else [node]
    return all(isinstance(part, ast.Name | ast.Is | ast.IsNot) for part in parts)


def _may_end(node: ast.AST, gifts: list[_Gift]) -> bool:
    """True for a loop with checks over what it gives to the program, which can end it (``for x in it: assert f(it) == x``)."""
    if not isinstance(node, ast.For | ast.While):
        return False
    inside = {inner for part in node.body for inner in ast.walk(part)}
    given = {name for call, names in gifts if call in inside for name in names}
    ends: list[ast.AST] = [] if isinstance(node, ast.For) else [node.test]
    ends += [inner.test for inner in inside if isinstance(inner, ast.If) and _leaves(inner)]
    ends += [inner for inner in inside if isinstance(inner, ast.Call) and getattr(inner.func, "id", "") in {"next", *given}]
    goes_over = set(_bases(node.iter)) if isinstance(node, ast.For) else set()
    return bool(given & goes_over.union(*map(_loaded, ends))) and any(_checks(ast.Module(node.body, [])))


def called(node: ast.AST) -> str:
    """Name of the function or method that an expression calls; "" if it is no call."""
    function = getattr(node, "func", None)
    return getattr(function, "attr", getattr(function, "id", ""))


def _leaves(node: ast.If) -> bool:
    return any(isinstance(inner, ast.Return | ast.Break | ast.Continue) for part in node.body for inner in ast.walk(part))


def _conditions(tree: ast.Module) -> Iterator[tuple[ast.AST, list[ast.expr]]]:
    """(condition, expressions that count or not by it): operands of ``or``, conditions of statements, and what loops go over."""
    checks = set(_checks(tree))
    negated = {node.operand for node in ast.walk(tree) if isinstance(node, ast.UnaryOp)}
    negated |= {node.test for node in ast.walk(tree) if isinstance(node, ast.If | ast.While) and any(map(_raises, node.body))}
    for node in ast.walk(tree):
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) != (node in negated):
            is_check = node in checks or any(isinstance(inner, ast.Compare | ast.Not) for inner in ast.walk(node))
            yield from ((part, node.values) for part in node.values if is_check)
        elif isinstance(node, ast.If | ast.While | ast.For):
            leaves = isinstance(node, ast.If) and _leaves(node)
            ruled = node.scope.body if leaves else [*node.body, *node.orelse]  # type: ignore[union-attr]
            yield node.iter if isinstance(node, ast.For) else node.test, list(_checks(ast.Module(ruled, [])))
        elif isinstance(node, ast.IfExp):
            yield node.test, [node.body, node.orelse]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("all", "any"):
            loops = [part for part in node.args if isinstance(part, ast.GeneratorExp | ast.ListComp)]
            yield from ((part, [loop.elt]) for loop in loops for each in loop.generators for part in (each.iter, *each.ifs))


def _loaded(node: ast.AST) -> _Names:
    """Names that an expression reads and does not bind itself."""
    names = [inner for inner in ast.walk(node) if isinstance(inner, ast.Name)]
    return frozenset(each.id for each in names) - {each.id for each in names if isinstance(each.ctx, ast.Store)} - _BUILTINS


def _imported_from_solution(tree: ast.AST) -> set[str]:
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "solution"]
    return {alias.asname or alias.name for node in imports for alias in node.names}


# ---------------------------------------------------------------------------------------------- where values come from


def _flow(edges: list[_Edge], program: set[str]) -> _Flow:
    flow: _Flow = defaultdict(dict, {name: {_ANYWHERE: {name}} for name in program})
    for name, place, _ in edges:
        flow[name].setdefault(place, set())
    size = -1
    while size != (size := sum(len(names) for sites in flow.values() for names in sites.values())):
        for name, place, source in edges:
            flow[name][place] |= _all_names(source, flow)
    return flow


def _mark_scopes(node: ast.AST, scope: ast.AST) -> None:
    waiting = [(node, scope)]
    while waiting:
        node, scope = waiting.pop()
        node.scope = scope  # type: ignore[attr-defined]
        inner = node if isinstance(node, ast.FunctionDef | ast.Lambda) else scope
        waiting += [(child, inner) for child in ast.iter_child_nodes(node)]


def _edges(tree: ast.Module) -> Iterator[_Edge]:
    functions = _functions(tree)
    for name, function in functions.items():
        returned = [node for node in ast.walk(function) if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) and node.value]
        yield from ((name, _ANYWHERE, node.value) for node in returned if node.value)
        parametrized = [(each.arg, decorator) for decorator in getattr(function, "decorator_list", []) for each in function.args.args]
        yield from ((name, _ANYWHERE, decorator) for name, decorator in parametrized)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (callee := _callee(node, functions)):
            parameters = [each.arg for each in callee.args.args][isinstance(node.func, ast.Attribute) :]
            pairs = [*zip(parameters, node.args, strict=False), *((word.arg, word.value) for word in node.keywords)]
            yield from ((name, _ANYWHERE, value) for name, value in pairs if name in parameters)
        for target, source in _assigned(node):
            names = [inner for inner in ast.walk(target) if isinstance(inner, ast.Name)]
            yield from ((each.id, (each.scope, _position(node)), source) for each in names)  # type: ignore[attr-defined]
            if isinstance(node, ast.AugAssign | ast.Call):  # the value before stays in it
                yield from ((each.id, (each.scope, _position(node)), each) for each in names)  # type: ignore[attr-defined]


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef | ast.Lambda]:
    """Functions of the tests by name."""
    found: dict[str, ast.FunctionDef | ast.Lambda] = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    named = [(target, source) for node in ast.walk(tree) for target, source in _assigned(node) if isinstance(source, ast.Lambda)]
    return found | {target.id: source for target, source in named if isinstance(target, ast.Name)}


def _callee(call: ast.Call, functions: dict[str, ast.FunctionDef | ast.Lambda]) -> ast.FunctionDef | ast.Lambda | None:
    """The function of the tests that is called."""
    own = functions.get(_own_method(call.func) or getattr(call.func, "id", ""))
    return call.func if isinstance(call.func, ast.Lambda) else own


def _changes(gifts: Iterable[_Gift], program: set[str]) -> Iterator[_Edge]:
    """Names that the program may change."""
    for call, names in gifts:
        end = (call.end_lineno, call.end_col_offset)
        yield from ((name, (call.scope, end), call) for name in names - program)  # type: ignore[attr-defined]


def _gifts(tree: ast.Module, program: set[str], flow: _Flow) -> Iterator[_Gift]:
    """Calls of the program's functions and methods, with the names of what they are given, or of a view of it; not of the
    arguments of a call that makes an argument (``f(build(a))``)."""
    views, own = _views(tree), {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            parts, names = [*node.args, *(word.value for word in node.keywords)], set[str]()
            handed_on = any(isinstance(part, ast.Name | ast.Attribute) and program & _loaded(part) for part in parts)  # map(f, [a])
            is_own = getattr(node.func, "id", "") in own
            if handed_on or (not is_own and (program & _loaded(node.func) or _all_names(node.func, flow))):
                waiting = [name.id for part in parts for name in _names_outside_calls(part)]
                while waiting:
                    if (name := waiting.pop()) not in names:
                        names.add(name)
                        waiting += views[name]
                yield node, names


def _gifts_inside(tree: ast.Module, gifts: list[_Gift]) -> Iterator[_Gift]:
    """Calls of functions of the tests, with the names from outside that the functions give to the program."""
    functions, given = _functions(tree), defaultdict[ast.AST | None, set[str]](set)
    for call, names in gifts:
        scope = call.scope  # type: ignore[attr-defined]
        given[scope] |= names - {each.arg for each in ast.walk(scope) if isinstance(each, ast.arg)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return ((call, names) for call in calls if (names := given.get(_callee(call, functions), set())))


def _views(tree: ast.Module) -> dict[str, set[str]]:
    """For each name the names whose values change with its value: aliases (``b = a``), methods (``step = it.__next__``), views and
    generators."""
    views: dict[str, set[str]] = defaultdict(set)
    called = {getattr(node.func, "id", "") for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        for target, source in _assigned(node) if isinstance(node, ast.Assign) else ():
            is_method = isinstance(source, ast.Attribute) and (source.attr.startswith("__") or getattr(target, "id", "") in called)
            if isinstance(target, ast.Name) and (is_method or isinstance(source, ast.Name | ast.Call | ast.GeneratorExp)):
                for base in _bases(source):
                    views[base].add(target.id)
                    views[target.id].add(base)
    return views


def _bases(node: ast.AST) -> Iterator[str]:
    """Names of the objects that an expression is a part or a view of."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield from _bases(node.value)
    elif isinstance(node, ast.Call) and called(node) in _VIEWS:
        for part in (getattr(node.func, "value", None), *node.args):
            yield from _bases(part) if part else ()
    elif isinstance(node, ast.GeneratorExp):
        for part in node.generators:
            yield from _bases(part.iter)


def _files(tree: ast.Module) -> set[str]:
    """``_FILES``, what is imported from such modules, and names of open files and paths."""
    found = set(_FILES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            found |= {each.asname or each.name for each in node.names if (module or each.name).partition(".")[0] in _FILES}
        for target, source in _assigned(node):
            while isinstance(source, ast.BinOp):  # Path("a") / "b"
                source = source.left
            if called(source) in ("open", "Path") or getattr(source, "id", "") in found:
                found |= {inner.id for inner in ast.walk(target) if isinstance(inner, ast.Name)}
    return found & {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _names_outside_calls(node: ast.AST) -> Iterator[ast.Name]:
    if isinstance(node, ast.Name):
        yield node
    elif isinstance(node, ast.Subscript):  # not its index
        yield from _names_outside_calls(node.value)
    elif not isinstance(node, ast.Call | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _names_outside_calls(child)


def _assigned(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            tuples = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            parts = zip(target.elts, node.value.elts, strict=False) if tuples else [(target, node.value)]  # type: ignore[attr-defined]
            yield from parts
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value:
        yield node.target, node.value
    elif isinstance(node, ast.For | ast.comprehension):
        yield node.target, node.iter
    elif isinstance(node, ast.withitem) and node.optional_vars:
        yield node.optional_vars, node.context_expr
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
        yield from ((node.func.value, argument) for argument in node.args)


def _position(node: Any) -> _Position:
    node = node.target if isinstance(node, ast.comprehension) else node
    node = node.optional_vars if isinstance(node, ast.withitem) else node
    return (node.lineno, node.col_offset)


def _all_names(node: ast.AST, flow: _Flow) -> _Names:
    """Names of the program that an expression depends on: by the last assignment before it in its scope, or else by all."""
    found: set[str] = set()
    waiting = [node]
    while waiting:
        inner = waiting.pop()
        is_call = isinstance(inner, ast.Call)  # a function that is given away is not called here
        waiting += [part for part in ast.iter_child_nodes(inner) if not (is_call and isinstance(part, ast.Lambda))]
        if isinstance(inner, ast.Attribute) and getattr(inner.value, "id", "") == "solution":
            found.add(inner.attr)
        if method := _own_method(inner):
            found |= flow.get(method, {}).get(_ANYWHERE, set())
        if isinstance(inner, ast.Name) and (inner.id not in _BUILTINS or inner.id in _FILES):
            scope = inner.scope  # type: ignore[attr-defined]
            sites = flow.get(inner.id, {})
            own = [site for site in sites if site != _ANYWHERE and site[0] is scope]
            before = [site for site in own if site[1] < _position(inner)]
            is_earlier = bool(own) and inner.id in _FILES  # what was read before the first call
            if before:
                chosen = [max(before, key=lambda site: site[1])]
            else:
                chosen = [site for site in sites if site == _ANYWHERE or site[0] is not scope] or [*sites] * (not is_earlier)
            found = found.union(*(sites[site] for site in chosen))
    return frozenset(found)


def _own_method(node: ast.AST) -> str:
    """Name of the method that ``self.name`` reads; "" for other expressions."""
    return node.attr if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("self", "cls") else ""


def _names(node: ast.AST, flow: _Flow) -> _Names:
    """``_all_names`` without classes, if there are other names."""
    found = _all_names(node, flow)
    return frozenset(name for name in found if not _is_class(name)) or found


def _is_class(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


# --------------------------------------------------------------------------------------------------------- what is checked


def _checks(tree: ast.Module) -> Iterator[ast.expr]:
    """Expressions that decide: asserted, compared, or the condition of an error. Functions of the tests have their own."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.test
        elif isinstance(node, ast.Expr) and (isinstance(node.value, ast.Compare) or _is_assertion(node.value, own)):
            yield node.value
        elif isinstance(node, ast.If | ast.While) and any(map(_raises, node.body)):
            yield node.test


def _raises(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Raise) for inner in ast.walk(node))


def _is_assertion(node: ast.expr, own: set[str]) -> bool:
    name = called(node)
    return name not in own and name.lstrip("_").lower().startswith(ASSERTIONS)


def _groups(node: ast.expr, flow: _Flow) -> Iterator[set[_Names]]:
    if isinstance(node, ast.BoolOp | ast.UnaryOp):
        for part in node.values if isinstance(node, ast.BoolOp) else [node.operand]:
            yield from _groups(part, flow)
    elif isinstance(node, ast.GeneratorExp | ast.ListComp):
        yield from _groups(node.elt, flow)
    elif isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
        if all(_names(part, flow) for part in parts):
            yield _sides(parts, flow)
        else:  # all are compared with a value of the tests
            is_limit = isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
            known = [part for part in parts if not _names(part, flow)]
            for part in parts:
                yield _alone(part, flow, [] if is_limit else known)
    elif isinstance(node, ast.Call):
        yield from _groups_of_call(node, flow)
    else:
        yield _alone(node, flow, [])


def _alone(node: ast.expr, flow: _Flow, others: list[ast.expr]) -> set[_Names]:
    """Each name of an expression on its own side, unless it equals one of ``others`` that no program could guess, or that the
    program's functions get in a round trip."""
    names = _names(node, flow)
    calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
    given = {ast.dump(argument) for call in calls if _names(call.func, flow) for argument in call.args}
    counts = any(getattr(call.func, "id", "") in ("sum", "len") for call in calls)
    is_whole = any(ast.dump(other) in given or not (_is_simple(other) or counts) for other in others)
    return {names} if is_whole else {frozenset({name}) for name in names}


def _is_simple(node: ast.expr) -> bool:
    """True for text, True, None, numbers like 0 and 1, and empty or equal containers: what a function returns that judges."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return all(map(_is_simple, node.elts))
    if isinstance(node, ast.Dict) or (isinstance(node, ast.Call) and not node.args):
        return not isinstance(node, ast.Dict) or not node.keys
    return isinstance(node, ast.Constant) and (isinstance(node.value, str) or not node.value or node.value == 1)


def _groups_of_call(node: ast.Call, flow: _Flow) -> Iterator[set[_Names]]:
    inner = [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
    parts = [part for part in inner if isinstance(part, ast.Compare | ast.BoolOp | ast.GeneratorExp | ast.ListComp)]
    name = getattr(node.func, "attr" if getattr(inner[-1] if inner else None, "id", "") == "solution" else "id", "")
    own = frozenset({name}) & flow.get(name, {}).get(_ANYWHERE, set())
    if parts:
        for part in parts:
            yield from _groups(part, flow)
    elif own and not _is_class(name):  # the program's function decides: about other names than its own?
        others = {other for part in inner for other in _names(part, flow) if not _is_class(other)} - own
        yield {own, frozenset(others)} if others else {own}
    elif node.args and (len(inner) == 1 or getattr(node.func, "attr", "") in ("assertTrue", "assertFalse")):
        yield from _groups(node.args[0], flow)
    else:
        yield _sides([*inner, *(word.value for word in node.keywords)], flow)


def _sides(parts: Iterable[ast.AST], flow: _Flow) -> set[_Names]:
    return {frozenset({own}) if own else names for part in parts if (names := _names(part, flow)) for own in [_own_value(part, names)]}


def _own_value(node: ast.AST, names: _Names) -> str:
    """The attribute of a function of the program that an expression reads (``f.want``), which the program chose; or ""."""
    base = getattr(node.value, "id", "") if isinstance(node, ast.Attribute) else ""
    return f"{base}.{node.attr}" if base in names and not _is_class(base) else ""  # type: ignore[attr-defined]
