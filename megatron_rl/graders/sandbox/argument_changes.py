"""Finds tests that know what is right only from what the program may have changed: its arguments, or files. Pure, on source trees.

``f(a) == sorted(a)`` holds for a program that empties ``a``. Which changes a program makes is seen when it runs; here is found which of
them would decide a check. An object is changed under all its names, and a part of it in every container and shallow copy that holds it.
"""

import ast
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from megatron_rl.graders.sandbox.value_flow import (
    FILES,
    Edge,
    Flow,
    all_names,
    assigned,
    called,
    callee,
    checks_in,
    flow_of,
    functions_of,
    is_assertion,
    is_class,
    may_leave,
    names_in,
    names_loaded,
    names_of,
    raises,
    scope_of,
    walk,
)

_VIEWS = ("iter", "reversed", "enumerate", "zip", "map", "filter", "islice", "chain", "memoryview", "keys", "values", "items")
"""Functions whose results change with their arguments."""
_SHALLOW = (*_VIEWS, "list", "tuple", "dict", "set", "sorted", "copy", "deque", "OrderedDict", "defaultdict")
"""Functions whose results hold the parts of their arguments."""
_WRAPPERS = ("partial", "cmp_to_key", "lru_cache", "cache", "vectorize")
_MAX_HELPERS = 2
"""Functions of the tests between a check and the program."""
_PLACES = ast.Attribute | ast.Subscript
_Links = dict[str, set[str]]
_Pair = tuple[Collection[str], Collection[str]]


class _Gift(NamedTuple):
    """A call or an assignment that gives objects of the tests to the program."""

    node: ast.AST
    objects: set[str]
    """Names of objects that the program may change."""
    around: set[str]
    """Names of containers that may hold such objects."""
    copied: set[str]
    """Names of objects of which it has the parts."""


def decisive_changes(tree: ast.Module, edges: list[Edge], flow: Flow, program: set[str]) -> frozenset[str]:
    """The kinds of change by which the program may decide a check: "changes" of arguments (``f(a) == sorted(a)``), changes of their
    "parts", and of "files"."""
    names, files = {"candidate", "solution", *program}, _files(tree)
    views, links = _views(tree), _links(tree, names)
    gifts = inside = [*_gifts(tree, names, flow, views, links)]
    for _ in range(_MAX_HELPERS):
        inside = [*_gifts_inside(tree, inside, views)]
        gifts = gifts + inside
    kinds = {
        "changes": [(gift.node, gift.objects | gift.around) for gift in gifts],
        "parts": [(gift.node, _linked(gift.objects | gift.around | gift.copied, links)) for gift in gifts],
        "files": [(gift.node, files) for gift in gifts if files],
    }
    flows = {kind: flow_of([*edges, *_changes(each, names)], program) for kind, each in kinds.items() if each}
    kinds["changes"] = kinds["parts"] = [(gift.node, gift.objects) for gift in gifts]
    return frozenset(kind for kind, changed in flows.items() if _rests_on(tree, flow, changed, kinds[kind]))


def _changes(gifts: list[tuple[ast.AST, set[str]]], program: set[str]) -> Iterator[Edge]:
    """Names that the program may change, at each call; it may keep what it was given before."""
    kept: dict[ast.AST, set[str]] = defaultdict(set)
    for node, names in sorted(gifts, key=lambda gift: _end(gift[0])):
        scope = scope_of(node)
        kept[scope] |= names - program
        yield from ((name, (scope, _end(node)), node) for name in kept[scope])


def _end(node: ast.AST) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------------------------------------- what is given


def _gifts(tree: ast.Module, program: set[str], flow: Flow, views: _Links, links: _Links) -> Iterator[_Gift]:
    """Calls of the program's functions and methods, operators of its objects, and assignments to their attributes and items. Not given
    are the arguments of a call that makes an argument (``f(build(a))``)."""
    own, loops = {node.name for node in walk(tree) if isinstance(node, ast.FunctionDef)}, _loops(tree)
    for node in walk(tree):
        if isinstance(node, ast.Assign) and any(isinstance(each, _PLACES) and names_in(each.value, flow) for each in node.targets):
            parts, handed_on = [node.value], False
        elif isinstance(node, ast.BinOp) and any(is_class(name) for part in (node.left, node.right) for name in all_names(part, flow)):
            parts, handed_on = [node.left, node.right], False
        elif isinstance(node, ast.Call):
            parts = [*node.args, *(word.value for word in node.keywords)]
            keys = [word.value for word in node.keywords if word.arg == "key" and names_in(word.value, flow)]
            handed_on = bool(keys) or any(_is_function(part, program) for part in parts)  # map(f, [a]), sorted(a, key=f)
            is_own = getattr(node.func, "id", "") in own
            if not handed_on and (is_own or not (program & names_loaded(node.func) or all_names(node.func, flow))):
                continue
        else:
            continue
        given = {name.id for part in parts for name in _names_outside_calls(part)}
        copied = set().union(*map(_held, parts))
        objects = _linked(given, views)
        inside = {name for each in objects for name in loops[each]} | (given if handed_on else set())
        yield _Gift(node, objects, _linked(inside, links), copied)


def _is_function(node: ast.AST, program: set[str]) -> bool:
    """True for a function of the program as an argument."""
    if called(node) in _WRAPPERS:
        return any(_is_function(part, program) for part in node.args)  # type: ignore[attr-defined]
    return isinstance(node, ast.Name | ast.Attribute) and bool(program & names_loaded(node))


def _gifts_inside(tree: ast.Module, gifts: list[_Gift], views: _Links) -> Iterator[_Gift]:
    """Calls of functions of the tests, with the names from outside that the functions give to the program, and the arguments."""
    functions, given = functions_of(tree), defaultdict[ast.AST | None, list[_Gift]](list)
    for gift in gifts:
        given[gift.node.scope].append(gift)  # type: ignore[attr-defined]
    for call in [node for node in walk(tree) if isinstance(node, ast.Call)]:
        function = callee(call, functions)
        if function and function in given:
            own = {each.arg for each in walk(function) if isinstance(each, ast.arg)}
            parameters = [each.arg for each in function.args.args][isinstance(call.func, ast.Attribute) :]
            arguments = dict(zip(parameters, call.args)) | {word.arg: word.value for word in call.keywords}  # noqa: B905 (*arguments)
            objects, around, copied = (set().union(*each) for each in zip(*(gift[1:] for gift in given[function]), strict=True))
            passed = [value for name, value in arguments.items() if name in objects | around | copied]
            given_on = _linked((name.id for value in passed for name in _names_outside_calls(value)), views)
            yield _Gift(call, objects - own | given_on, around - own, (copied - own).union(*map(_held, passed)))


def _names_outside_calls(node: ast.AST) -> Iterator[ast.Name]:
    """Names of the objects that an argument is, or holds; a slice is a copy."""
    if isinstance(node, ast.Name):
        yield node
    elif isinstance(node, ast.Subscript):  # not its index
        yield from _names_outside_calls(node.value) if not isinstance(node.slice, ast.Slice) else ()
    elif not isinstance(node, ast.Call | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _names_outside_calls(child)


def _linked(names: Iterable[str], links: _Links) -> set[str]:
    """Names that are linked to ``names``, and these."""
    found, waiting = set[str](), [*names]
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += links[name]
    return found


def _views(tree: ast.Module) -> _Links:
    """For each name the names whose values change with its value: aliases (``b = a``), methods (``step = it.__next__``), views,
    generators, and objects of the tests' classes that hold it."""
    pairs: list[_Pair] = []
    calls = {getattr(node.func, "id", "") for node in walk(tree) if isinstance(node, ast.Call)}
    holders = {node.name for node in walk(tree) if isinstance(node, ast.ClassDef)}
    for node in walk(tree):
        for target, source in assigned(node) if isinstance(node, ast.Assign) else ():
            is_method = isinstance(source, ast.Attribute) and (source.attr.startswith("__") or getattr(target, "id", "") in calls)
            if isinstance(target, ast.Name) and (is_method or isinstance(source, ast.Name | ast.Call | ast.GeneratorExp)):
                pairs.append(({target.id}, {*_bases(source, holders)}))
    return _undirected(pairs)


def _links(tree: ast.Module, program: set[str]) -> _Links:
    """For each name the names of containers that may hold the same parts."""
    apart = program | functions_of(tree).keys()
    statements = [node for node in walk(tree) if not isinstance(node, ast.For | ast.comprehension)]
    return _undirected((names_of(target) - apart, _held(source) - apart) for node in statements for target, source in assigned(node))


def _undirected(pairs: Iterable[_Pair]) -> _Links:
    links: _Links = defaultdict(set)
    for names, others in pairs:
        for one, other in itertools.product(names, others):
            links[one].add(other)
            links[other].add(one)
    return links


def _loops(tree: ast.Module) -> _Links:
    """For each name of a loop the names of what the loop goes over."""
    loops: _Links = defaultdict(set)
    for node in walk(tree):
        for target, source in assigned(node) if isinstance(node, ast.For | ast.comprehension) else ():
            for name in names_of(target):
                loops[name] |= _held(source)
    return loops


def _held(node: ast.AST) -> set[str]:
    """Names of the objects whose parts an expression may hold."""
    found, waiting = set[str](), [node]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, ast.Name):
            found.add(inner.id)
        waiting += [] if isinstance(inner, ast.Call) and called(inner) not in _SHALLOW else ast.iter_child_nodes(inner)
    return found


def _bases(node: ast.AST, holders: Iterable[str] = ()) -> Iterator[str]:
    """Names of the objects that an expression is a part or a view of."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield from _bases(node.value, holders)
    elif isinstance(node, ast.Call) and called(node) in (*_VIEWS, *holders):
        for part in (getattr(node.func, "value", None), *node.args):
            yield from _bases(part, holders) if part else ()
    elif isinstance(node, ast.GeneratorExp):
        for each in node.generators:
            yield from _bases(each.iter, holders)


def _files(tree: ast.Module) -> set[str]:
    """``FILES``, what is imported from such modules, and names of open files and paths."""
    found = set(FILES)
    for node in walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            found |= {each.asname or each.name for each in node.names if (module or each.name).partition(".")[0] in FILES}
        for target, source in assigned(node):
            while isinstance(source, ast.BinOp):  # Path("a") / "b"
                source = source.left
            if called(source) in ("open", "Path") or getattr(source, "id", "") in found:
                found |= names_of(target)
    return found & names_of(tree)


# ------------------------------------------------------------------------------------------------------------- what is decided


def _rests_on(tree: ast.Module, flow: Flow, changed: Flow, gifts: list[tuple[ast.AST, set[str]]]) -> bool:
    """True if a check knows what is right only from what the program may have changed; or if such a thing says whether a result
    is checked (``f(a) == 4 or not a``), or how often."""

    def is_changed(node: ast.AST) -> bool:
        return bool(names_in(node, changed)) and not names_in(node, flow)

    given = set().union(*(names for _, names in gifts))  # a container of what was given is as long as before
    for condition, ruled in _conditions(tree):
        if is_changed(condition) and names_loaded(condition) & given and any(names_in(part, flow) for part in ruled):
            return True
    equals = [node for node in walk(tree) if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq)]
    compared = [part for node in equals for part in (node.left, *node.comparators)]
    bound = {part.id for part in compared if isinstance(part, ast.Name)} | _loops(tree).keys()
    for check in checks_in(tree):
        items = [node for node in walk(check) if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice)]
        free = [item for item in items if is_changed(item.value) and names_in(item.slice, flow) and names_loaded(item.slice) - bound]
        if free and all(names_in(item.value, changed) for item in items):  # a[f(a)] == 4
            return True
    decided = {node for check in checks_in(tree) for node in walk(check)}
    for node in walk(tree):
        if _may_end(node, gifts):
            return True
        parts = _compared(node, flow, node in decided)
        if any(map(is_changed, parts)) and all(names_in(part, changed) for part in parts):
            return True
    return False


def _compared(node: ast.AST, flow: Flow, is_in_check: bool) -> list[ast.expr]:
    """Expressions that must agree, for all that an expression says."""
    if isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
        is_identity = all(isinstance(each, ast.Name | ast.Is | ast.IsNot) for each in (*parts, *node.ops))  # no change decides it
        return [] if is_identity else parts
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and is_in_check:
        return [node.left, node.right]
    if isinstance(node, ast.Call) and (is_assertion(node, set()) or (is_in_check and not names_in(node.func, flow))):
        base = [node.func.value] if isinstance(node.func, ast.Attribute) and len(node.args) == 1 else []
        parts = [*base, *node.args[:2]]
        return parts if len(parts) > 1 or is_assertion(node, set()) else []
    return []


def _may_end(node: ast.AST, gifts: list[tuple[ast.AST, set[str]]]) -> bool:
    """True for a loop with checks over what it gives to the program, which can end it (``for x in it: assert f(it) == x``)."""
    if not isinstance(node, ast.For | ast.While):
        return False
    inside = {*walk(*node.body)}
    given = {name for call, names in gifts if call in inside for name in names}
    ends: list[ast.AST] = [] if isinstance(node, ast.For) else [node.test]
    ends += [inner.test for inner in inside if isinstance(inner, ast.If) and may_leave(inner)]
    ends += [inner for inner in inside if isinstance(inner, ast.Call) and getattr(inner.func, "id", "") in {"next", *given}]
    goes_over = set(_bases(node.iter)) if isinstance(node, ast.For) else set()
    return bool(given & goes_over.union(*map(names_loaded, ends))) and any(checks_in(*node.body))


def _conditions(tree: ast.Module) -> Iterator[tuple[ast.AST, list[ast.expr]]]:
    """(condition, expressions that count or not by it): operands of ``or``, conditions of statements, and what loops go over."""
    checks = set(checks_in(tree))
    negated = {node.operand for node in walk(tree) if isinstance(node, ast.UnaryOp)}
    negated |= {node.test for node in walk(tree) if isinstance(node, ast.If | ast.While) and any(map(raises, node.body))}
    for node in walk(tree):
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) != (node in negated):
            is_check = node in checks or any(isinstance(inner, ast.Compare | ast.Not) for inner in walk(node))
            yield from ((part, node.values) for part in node.values if is_check)
        elif isinstance(node, ast.If | ast.While | ast.For):
            leaves = isinstance(node, ast.If) and may_leave(node)
            ruled = node.scope.body if leaves else [*node.body, *node.orelse]  # type: ignore[union-attr]
            yield node.iter if isinstance(node, ast.For) else node.test, list(checks_in(*ruled))
        elif isinstance(node, ast.IfExp):
            yield node.test, [node.body, node.orelse]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("all", "any"):
            loops = [part for part in node.args if isinstance(part, ast.GeneratorExp | ast.ListComp)]
            yield from ((part, [loop.elt]) for loop in loops for each in loop.generators for part in (each.iter, *each.ifs))
