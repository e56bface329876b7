"""Marks the checks of tests, and finds those that tests which hold must have made. Pure, on source trees.

A program may skip checks of weak tests: by an exception that they handle, by a loop over the nothing that it gives, by a condition that
it decides, or by a function of theirs that it never calls. The law: each check is made at least once, or it stands where the tests' own
decision did not lead.
"""

import ast
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from megatron_rl.graders.analysis.oracles import Oracles
from megatron_rl.graders.analysis.sides import Sides
from megatron_rl.graders.analysis.value_flow import called, checks_in, class_uses, identifiers, position, raises, walk

_CLOCKS = frozenset("time perf_counter monotonic process_time now".split())
"""Names in conditions that a slow program decides."""


class Owed(NamedTuple):
    """The law of one check: one of ``marks`` is reached if ``under`` is, or in any case if that is None."""

    marks: frozenset[tuple[int, int]]
    under: tuple[int, int] | None


class OwedChecks:
    """Checks that tests have to make.

    Args:
        run: Names of the functions and classes that are run, and all that the tests read.
    """

    def __init__(self, tree: ast.Module, oracles: Oracles, run: Collection[str]) -> None:
        self._oracles, self.loops, self._run = oracles, oracles.loops_to_watch(), run
        self.marked: set[ast.AST] = set()
        self.all = [*self._of_block(tree.body, None)]

    def _one_of(self, nodes: list[Any], under: ast.AST | None) -> Owed:
        self.marked |= {*nodes, *([under] if under else [])} - self.loops.keys()
        return Owed(frozenset(map(position, nodes)), position(under) if under else None)

    def _of_block(self, body: list[Any], under: ast.AST | None) -> Iterator[Owed]:
        last = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for number, node in enumerate(body):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                if last[node.name] is node and self._is_run(node):
                    yield from self._of_block(node.body, under)
            elif isinstance(node, ast.If):
                leaves = isinstance(node.body[-1], ast.Return | ast.Continue | ast.Break)
                yield from self._of_condition(node, [*node.orelse, *(body[number + 1 :] if leaves else [])], under)
                if leaves:
                    return
            else:
                yield from self._of_statement(node, under)

    def _of_condition(self, node: ast.If, otherwise: list[ast.stmt], under: ast.AST | None) -> Iterator[Owed]:
        if first := [branch[0] for branch in (node.body, otherwise) if _has_checks(branch)]:
            is_decided = self._oracles.decides(node.test) or identifiers(node.test) & _CLOCKS
            yield self._one_of(first if is_decided else [node], under)
        elif any(isinstance(each, ast.Raise) for each in node.body):
            yield self._one_of([node], under)
        for branch in (node.body, otherwise):
            yield from self._of_block(branch, branch[0] if branch else None)

    def _of_statement(self, node: Any, under: ast.AST | None) -> Iterator[Owed]:
        expects_error = isinstance(node, ast.With) and any(is_error for is_error, _ in class_uses(*node.items))
        if expects_error and not raises(node):
            return  # the program's exception may come before the check
        for part in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
            yield from self._of_block(part.body, part.body[0])
        if isinstance(node, ast.For | ast.While | ast.With | ast.Try):
            for block in (node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])):
                yield from self._of_block(block, under)
        elif not isinstance(node, ast.Match):
            yield from (self._one_of([part], under) for part in walk(node) if part in self.loops or _is_check(part))

    def _is_run(self, node: ast.FunctionDef | ast.ClassDef) -> bool:
        is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test")
        skips = any("skip" in name or name == "xfail" for each in node.decorator_list for name in identifiers(each))
        return (is_test or node.name in self._run) and not skips


def _has_checks(body: list[Any]) -> bool:
    return any(not isinstance(check, ast.Constant) for check in checks_in(*body))  # assert False stands where nothing should get to


def _is_check(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert | ast.Expr):
        return _has_checks([node])
    return isinstance(node, ast.Lambda) and called(node.body).startswith("assert")


def _case_call(method: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name("__case__", ast.Load()), method, ast.Load()), [*arguments], [])


def _constant(place: tuple[int, ...]) -> ast.expr:
    return ast.Tuple([*map(ast.Constant, place)], ast.Load())


_BLOCKS = (ast.For, ast.While, ast.If)


class MarkChecks(ast.NodeTransformer):
    """Turns ``assert x`` into ``with __case__: assert x``, whose exit records whether the assert held, calls in
    ``zips`` into calls of ``__case__.zip`` and ``__case__.map``, ``type(x)`` into ``__case__.type_of(x)``, ``x`` of ``loops`` over x into
    ``__case__.each(x, ...)``, and puts ``__case__.reach(position)`` before the statements that are ``owed``. Of tests that use arrays,
    sides whose shapes must agree become ``__case__.shape(site, is_given, x)``. Of tests whose ``sides`` are recorded, parts ``x`` become
    ``__case__.side(place, x)``, assertions that are calls stand under ``with __case__`` too, and all statements of tests under
    ``with __case__.statement({place: lambda: x})``."""

    def __init__(self, oracles: Oracles, owed: OwedChecks, sides: Sides | None, use_arrays: bool) -> None:
        self._zips, self._loops, self._owed = oracles.zips_to_watch(), owed.loops, owed.marked
        self._sides, self._places = sides, sides.places if sides else {}
        self._plain: dict[Any, str] = {}
        """Calls of ``__case__.side`` with plain parts, and their places."""
        self._arrays = oracles.arrays_to_watch() if use_arrays else {}

    def visit(self, node: ast.AST) -> Any:
        place, is_plain = self._places.get(node), self._sides and node in self._sides.plain  # type: ignore[call-overload]
        mark = position(node) if node in self._owed else None
        array = self._arrays.get(node)  # type: ignore[call-overload]
        node = super().visit(node)
        if mark and isinstance(node, ast.Lambda):
            node.body = ast.BoolOp(ast.Or(), [_case_call("reach", _constant(mark)), node.body])
        elif mark:
            return [ast.copy_location(ast.Expr(_case_call("reach", _constant(mark))), node), node]
        if array:
            node = _case_call("shape", _constant(array[0]), ast.Constant(array[1]), node)  # type: ignore[arg-type]
        if place:
            node = _case_call("side", ast.Constant(place), node)  # type: ignore[arg-type]
            self._plain |= {node: place} if is_plain else {}
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if node in self._loops:
            node.iter = _case_call("each", node.iter, _constant(position(node)), *self._loops[node])
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        is_type = getattr(node.func, "id", "") == "type" and len(node.args) == 1
        name = "type_of" if is_type else called(node) if node in self._zips else ""
        return _case_call(name, *node.args) if name else node

    def visit_Module(self, node: ast.Module) -> ast.AST:
        return self._apart(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._apart(node) if node.name == "check" or node.name.startswith("test") else self.generic_visit(node)

    def _apart(self, node: Any) -> ast.AST:
        """A module or function each of whose statements can fail alone, also those in loops and conditions."""
        self.generic_visit(node)
        blocks = [node] if self._sides else []
        while blocks:
            block = blocks.pop()
            for body in (block.body, getattr(block, "orelse", [])):
                blocks += [each for each in body if isinstance(each, _BLOCKS)]
                body[:] = [each if isinstance(each, ast.ImportFrom) else self._under_statement(each) for each in body]
        return node

    def _under_statement(self, node: ast.stmt) -> ast.stmt:
        nodes = [] if isinstance(node, _BLOCKS) else ast.walk(node)
        parts: dict[str, Any] = {self._plain[each]: each for each in nodes if each in self._plain}
        thunks: list[Any] = [ast.Lambda(ast.arguments([], [], None, [], [], None, []), part) for part in parts.values()]
        statement = _case_call("statement", ast.Dict([*map(ast.Constant, parts)], thunks))
        return ast.copy_location(ast.With([ast.withitem(statement, None)], [node]), node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return self._marked(node) if node.value in self._places else self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return self._marked(node)

    def _marked(self, node: ast.stmt) -> ast.AST:
        self.generic_visit(node)
        item = ast.withitem(ast.Name("__case__", ast.Load()), None)
        return ast.copy_location(ast.With([item], [node]), node)
