"""Composes the code to run from a response, a prompt and tests: pure functions on source text.

Invariants: a response that defines the entry point is a whole program (only the part of the prompt before the entry
point's definition is put in front); any other response continues the prompt. Helpers of the prompt that tests use come
from the prompt, never from the response. No code of a response runs here, but compiling it may exhaust memory or the
parser's stack, so only processes of the sandbox compile.
"""

import ast
import builtins
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import CodeType
from typing import Any

from megatron_rl.graders.sandbox.code_cases import IMPORTS
from megatron_rl.graders.sandbox.oracles import changes_that_decide, checked_alone, unpinned_oracle, zips_to_watch

_ONE_INTERPRETER = {
    "asyncio", "await", "inspect", "mock", "patch", "MagicMock", "monkeypatch", "capsys", "redirect_stdout", "stdout",
    "stdin", "stderr", "argv", "environ", "builtins", "globals", "gc", "importlib", "warns", "recwarn", "assertWarns", "assertWarnsRegex",
    "assertLogs", "assertNoLogs", "caplog", "capfd", "__cause__", "__context__", "__notes__", "__traceback__",
}  # fmt: skip
"""Names in tests that need the interpreter of the tested code."""


class InvalidTests(ValueError):
    """Tests that cannot run with any response, because the data is invalid."""


@dataclass(frozen=True)
class Tests:
    code: CodeType
    names: frozenset[str]
    """Names that the tests use from the program."""
    constants: frozenset[str]
    """Subset of ``names`` that the tests only read."""
    errors: frozenset[str]
    """Subset of ``names`` that the tests use as exceptions."""
    library: Mapping[str, bool]
    """Names of the library that the tests use without importing them; True if the name is a module."""
    decided_by: frozenset[str]
    """Changes of arguments ("changes") and of "files", if these alone may say what is right."""
    use_arrays: bool
    """True if the tests use numpy, or another library of arrays."""
    expected: frozenset[str]
    """The words "nan" and "inf", if the tests mention them; "narrow", if they mention types of numbers."""
    expect_errors: bool
    """True if the tests handle exceptions."""
    hide_errors: bool
    """True if a class of the tests has a method whose exceptions Python swallows (``_HIDING``), or the tests swallow any in a check."""
    doubt: str
    """A use of the program's names that no verdict can rest on; "" if there is none."""
    num_asserts: int
    """Number of asserts in the source; a loop may run one assert several times."""
    lines: tuple[str, ...]
    functions: tuple[str, ...]
    """Functions ``test_...`` without parameters, and test case classes, in the order of the source."""

    def check(self, defined: Collection[str]) -> None:
        """Raise InvalidTests if the program, which defines the names ``defined``, could judge itself."""
        if self.doubt:
            raise InvalidTests(self.doubt)
        if taken := sorted(self.library.keys() & set(defined)):
            raise InvalidTests(f"the tests use {taken[0]} without importing it, and the program defines it")


# ------------------------------------------------------------------------------------------------------------ program


def compose(code: str, prompt_code: str, entry_point: str) -> list[CodeType]:
    """Code objects to execute in sequence in one namespace.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: from the compiler, for code that is not Python.
    """
    # A whole program takes precedence: prompt plus program might compile too, but would define the function twice.
    alone = _try_compile(code)
    if alone is not None and (not entry_point or root_of(entry_point) in _defined(ast.parse(code).body)):
        return [*prelude(prompt_code, entry_point), alone]
    if prompt_code:
        for text in _continuations(prompt_code, code):
            whole = _try_compile(text)
            if whole is not None and (not entry_point or root_of(entry_point) in _defined(ast.parse(text).body)):
                return [whole]
    return [*prelude(prompt_code, entry_point), compile(code, "<solution>", "exec")]


def _continuations(prompt_code: str, code: str) -> Iterator[str]:
    """The prompt continued by ``code``: unchanged first, then with corrected indentation."""
    yield prompt_code + code
    yield f"{prompt_code}\n{code}"
    yield f"{prompt_code}\n    {code.lstrip()}"  # the first line has lost its indentation
    yield f"{prompt_code}\n{textwrap.indent(textwrap.dedent(code), '    ')}"


def _try_compile(text: str) -> CodeType | None:
    try:
        return compile(text, "<solution>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None


def prelude(prompt_code: str, entry_point: str) -> list[CodeType]:
    """Code of the prompt without the definition of ``entry_point``: imports and helpers. Empty for a prompt without
    code."""
    kept = _prelude_statements(prompt_code, entry_point)
    return [compile(ast.Module(kept, []), "<prompt>", "exec")] if kept else []


def _prelude_statements(prompt_code: str, entry_point: str) -> list[ast.stmt]:
    kept: list[ast.stmt] = []
    root, is_after = root_of(entry_point), False
    for node in _prompt_statements(prompt_code):
        is_helper = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign)
        if root in _defined([node]):
            is_after = True
        elif not isinstance(node, ast.Expr) and (not is_after or (is_helper and root not in _names_in([node]))):
            kept.append(node)
    return kept


def _prompt_statements(prompt_code: str) -> list[ast.stmt]:
    """Statements of the prompt, which may end within an unfinished function; empty for a prompt without code."""
    for text in (prompt_code, f"{prompt_code}\n    pass"):
        try:
            return ast.parse(text).body
        except (SyntaxError, ValueError):
            continue
    return []


def infer_entry_point(prompt_code: str) -> str:
    """Name of the last function that a prompt starts to define; "" if there is none."""
    statements = _prompt_statements(prompt_code)
    names = [node.name for node in statements if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return names[-1] if names else ""


def defined_in(text: str) -> set[str]:
    """Names that statements at the start of a line bind. Uses no parser, so any text is safe."""
    definitions = re.findall(r"^(?:async\s+)?(?:def|class)\s+(\w+)|^(\w+)\s*(?::[^=\n]*)?=", text, re.MULTILINE)
    return {defined or bound for defined, bound in definitions}


def names_of_tests(tests: str, setup: str) -> set[str]:
    """Names that tests use from the program; empty for tests that cannot be parsed."""
    try:
        read = read_tests(tests, setup=setup)
    except InvalidTests:
        return set()
    return set(read.names - _bound_somewhere(ast.parse(tests)))


def root_of(entry_point: str) -> str:
    """First name of an entry point such as ``Solution().add``."""
    return re.split(r"\W", entry_point, maxsplit=1)[0]


def record_classes(namespace: Mapping[str, Any]) -> dict[str, type]:
    """Classes defined by the prompt, whose instances may be sent as their attributes (nodes of lists and trees)."""
    return {
        name: value
        for name, value in namespace.items()
        if isinstance(value, type) and value.__module__ == namespace["__name__"]
        if _is_record(value, namespace) or issubclass(value, Enum)
    }


def _is_record(kind: type, namespace: Mapping[str, Any]) -> bool:
    """True if instances have no state except attributes: ``kind`` and its bases are plain classes of the prompt."""
    bases = kind.__mro__[:-1]
    return kind.__dictoffset__ != 0 and all(type(base) is type and namespace.get(base.__name__) is base for base in bases)


def _defined(body: Sequence[ast.stmt]) -> set[str]:
    """Names that statements bind in their module, and the methods of ``Solution``."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
            if node.name == "Solution":  # LeetCode's tests call its methods
                names |= {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                names.add(inner.id)
            elif isinstance(inner, (ast.Import, ast.ImportFrom)):
                names |= {(alias.asname or alias.name).partition(".")[0] for alias in inner.names}
            elif isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(inner.name)
    return names


# -------------------------------------------------------------------------------------------------------------- tests


def read_tests(text: str, *, setup: str = "", prompt_code: str = "", entry_point: str = "", defined: Collection[str] = ()) -> Tests:
    """Compile tests: statements with ``assert``, ``check(candidate)`` as HumanEval has it, functions ``test_...``, or
    ``unittest`` cases. ``setup`` runs before the tests, and ``defined`` are names that the program defines.

    Raises:
        InvalidTests: tests that do not compile, test nothing, or need the program's interpreter.
    """
    try:
        tree, before = ast.parse(text), ast.parse(setup)
        shared = _prelude_statements(prompt_code, entry_point)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidTests(f"the tests do not compile: {error}") from error
    if not any(isinstance(node, (ast.Assert, ast.Call, ast.Compare, ast.Raise)) for node in ast.walk(tree)):
        raise InvalidTests("the tests assert nothing")
    own = _defined(tree.body)
    if "check" in own and not _uses_check(tree.body):
        if not entry_point:
            raise InvalidTests("the tests define check(candidate), but the entry_point to give to it is missing")
        tree.body += ast.parse(f"if check({entry_point}) is False:\n    raise AssertionError('check returned False')").body
    tree.body = [_asserted(node) for node in tree.body]
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    known = own | _defined(before.body) | _defined(shared) | _RUN_PROGRAM
    entry = {root_of(entry_point)} - {""} - own
    names = frozenset((loaded - known - set(dir(builtins)) - {"__name__", "__file__"}) | entry)
    program_names = names - _bound_somewhere(tree)
    library = _library_names(tree, program_names - entry)
    tested, direct = checked_alone(tree, program_names - {name for name, is_module in library.items() if is_module})
    if program_names - library.keys():  # otherwise what is tested has a name of the library
        tested = frozenset(name for name in direct if name in defined and not name[:1].isupper())
    library = {name: is_module for name, is_module in library.items() if name not in tested}
    names, program_names = names - library.keys(), program_names - library.keys()
    errors = _names_in(node for is_error, node in _class_uses(tree) if is_error) & program_names
    constants = program_names - _used_as_functions(tree) - entry - errors - {"candidate"}
    _check_runnable(tree, names, constants, prompt_code)
    # ``assert False`` stands where no right program gets to.
    num_asserts = sum(isinstance(node, ast.Assert) and not _is_false(node.test) for node in ast.walk(tree))
    functions = tuple(node.name for node in tree.body if _is_test(node))  # type: ignore[attr-defined]
    doubt = _doubt(tree, program_names, constants, root_of(entry_point))
    decided_by = changes_that_decide(tree, program_names)
    try:
        marks = _MarkAsserts(zips_to_watch(tree, program_names))
        code = compile(ast.fix_missing_locations(marks.visit(tree)), "<tests>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidTests(f"the tests do not compile: {error}") from error
    use_arrays = bool(_ARRAYS.search(f"{prompt_code}\n{setup}\n{text}"))
    expected = frozenset(word.lower() for word in _NOT_FINITE.findall(f"{setup}\n{text}"))
    expected |= {"narrow"} if _NARROW.search(f"{prompt_code}\n{setup}\n{text}") else frozenset()
    expect_errors = any(is_error for is_error, _ in _class_uses(tree))
    hide_errors = any((isinstance(node, ast.FunctionDef) and node.name in _HIDING) or _swallows(node) for node in ast.walk(tree))
    habits = (decided_by, use_arrays, expected, expect_errors, hide_errors, doubt, num_asserts)
    return Tests(code, names, constants, errors, library, *habits, tuple(text.splitlines()), functions)


_HIDING = ("__getattr__", "__getattribute__", "__getitem__")
"""Methods whose IndexError ends a loop, and whose AttributeError is no attribute to ``hasattr`` and ``getattr``."""


def _swallows(node: ast.AST) -> bool:
    """True for a ``try`` or ``with suppress`` in which any exception skips an assert unseen."""
    if isinstance(node, ast.Try):
        silent = [each for each in node.handlers if not any(isinstance(inner, ast.Raise | ast.Assert) for inner in ast.walk(each))]
        caught: list[ast.AST] = [each.type or ast.Name("Exception") for each in silent]
    elif isinstance(node, ast.With):
        caught = [part for item in node.items for is_error, part in _class_uses(item.context_expr) if is_error]
    else:
        return False
    asserts = [inner for inner in ast.walk(node) if isinstance(inner, ast.Assert) and not _is_false(inner.test)]
    return bool(asserts and _names_in(caught) & {"Exception", "BaseException"})


_RUN_PROGRAM = {"run_program"}
"""Functions that the tests may call to run the program as a script: run_program(input text) -> printed text."""


def _check_runnable(tree: ast.AST, names: frozenset[str], constants: frozenset[str], prompt: str) -> None:
    """Reject tests that cannot run with any program. Raises InvalidTests."""
    used = _identifiers(tree)
    if shared := used & _ONE_INTERPRETER or ({"catch_warnings"} if used >= {"catch_warnings", "record"} else set()):
        raise InvalidTests(f"the tests need the program's interpreter ({min(shared)}), which they do not share")
    if _names_in(node for is_error, node in _class_uses(tree) if not is_error) & names:
        raise InvalidTests("the tests use a class of the program in isinstance or as a base: it stays with the program")
    guarded = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Try) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in guarded:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or "."]
            for module in {name.partition(".")[0] for name in modules} - {"solution"}:
                if not module or find_spec(module) is None:
                    raise InvalidTests(f"the tests import {module or 'a relative module'}, which is not installed")
    unknown = [name for name in sorted(constants) if not re.search(rf"\b{name}\b", prompt)]
    if unknown and constants != names:
        raise InvalidTests(f"the tests read {unknown[0]}, which neither they nor the prompt define")


_LIBRARY = IMPORTS + (
    "from copy import copy, deepcopy; from decimal import Decimal; from fractions import Fraction\n"
    "from dataclasses import *; from datetime import date, timedelta; from operator import itemgetter, attrgetter\n"
)
_ALIASES = {"np": "numpy", "pd": "pandas", "sp": "sympy", "nx": "networkx"} | {
    name: name for name in "numpy pandas pytest scipy sympy torch networkx".split()
}
_ARRAYS = re.compile(r"\b(?:numpy|np|pandas|pd|torch|scipy|jax|tensorflow)\b")
_NARROW = re.compile(r"\b(?:u?int(?:8|16)|float16|half|dtype)\b")
_NOT_FINITE = re.compile(r"nan(?=\b)|inf(?=inity\b|\b)", re.IGNORECASE)


def library_value(name: str, is_module: bool) -> Any:
    """The module ``name``, or the value that the usual imports give to ``name``."""
    if is_module:
        return import_module(_ALIASES.get(name, name))
    return _usual_imports()[name]


@lru_cache(maxsize=1)
def _usual_imports() -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(_LIBRARY, namespace)
    return namespace


def _library_names(tree: ast.AST, names: frozenset[str]) -> dict[str, bool]:
    """The subset of ``names`` that tests use as names of the library; True for a module."""
    nodes = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    bases = {node.id for node in nodes if isinstance(node, ast.Name)}
    modules = {name for name in names & bases if name in sys.stdlib_module_names or name in _ALIASES}
    return {name: name in modules for name in names if name in modules or name in _usual_imports()}


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def _doubt(tree: ast.Module, names: frozenset[str], constants: frozenset[str], entry: str) -> str:
    """The reason why the tests are in doubt: the program would choose the value that it is compared with."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
            used = _names_in(parts) & names
            read = sorted(used & constants)
            if read and (not isinstance(node, ast.Assert) or used - constants):
                return f"the tests use the program's own {read[0]} to check it"
    oracle = unpinned_oracle(tree, names, entry)
    return f"the tests use the program's own {oracle} to check it" if oracle else ""


def _uses_check(body: Sequence[ast.stmt]) -> bool:
    statements = [node for node in body if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
    return any(isinstance(inner, ast.Name) and inner.id == "check" for node in statements for inner in ast.walk(node))


def _used_as_functions(tree: ast.AST) -> set[str]:
    """Names that the code calls, passes as arguments, uses as decorators or reads attributes of."""
    found: set[str] = set()
    for node in ast.walk(tree):
        used = [node.func, *node.args, *(word.value for word in node.keywords)] if isinstance(node, ast.Call) else []
        used += [node.value] if isinstance(node, ast.Attribute) else getattr(node, "decorator_list", [])
        found |= {inner.id for inner in used if isinstance(inner, ast.Name)}
    return found


def _bound_somewhere(tree: ast.AST) -> set[str]:
    """Names bound as local variables, parameters, imports and the like."""
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)):
            found.add(node.name or "")
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found


def _asserted(node: ast.stmt) -> ast.stmt:
    """Turn a comparison as a statement (``f(1) == 2``) into an assert."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Compare):
        return ast.copy_location(ast.Assert(node.value, None), node)
    return node


def _is_test(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef):
        required = len(node.args.args) + len(node.args.posonlyargs) - len(node.args.defaults)
        return node.name.startswith("test") and required == 0
    return isinstance(node, ast.ClassDef) and any("TestCase" in ast.unparse(base) for base in node.bases)


def _identifiers(tree: ast.AST) -> set[str]:
    """Names, attributes, imports and parameters; ``await`` represents any asynchronous code."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Await, ast.AsyncFunctionDef)):
            found.add("await")
        elif isinstance(node, ast.alias):
            found |= set(node.name.split("."))
        else:
            found |= {value for key in ("id", "attr", "arg") if isinstance(value := getattr(node, key, None), str)}
    return found


def _class_uses(tree: ast.AST) -> Iterator[tuple[bool, ast.AST]]:
    """Yield (is_exception, expression) for each expression that tests use as a class, as in ``isinstance``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            yield True, node.type or ast.Constant(None)
        elif isinstance(node, ast.ClassDef):
            yield from ((False, base) for base in node.bases)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("raises", "assertRaises", "assertRaisesRegex", "suppress"):
                yield from ((True, argument) for argument in node.args[:1])
            elif called in ("isinstance", "issubclass", "assertIsInstance", "assertNotIsInstance"):
                yield from ((False, argument) for argument in node.args[called != "issubclass" :])


def _names_in(nodes: Iterable[ast.AST]) -> frozenset[str]:
    return frozenset(inner.id for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Name))


class _MarkAsserts(ast.NodeTransformer):
    """Turns ``assert x`` into ``with __case__: assert x``, whose exit records whether the assert held, and calls in
    ``zips`` into calls of ``__case__.zip`` and ``__case__.map``."""

    def __init__(self, zips: Sequence[ast.Call]) -> None:
        self._zips = zips

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if any(node is each for each in self._zips):
            node.func = ast.Attribute(ast.Name("__case__", ast.Load()), node.func.id, ast.Load())  # type: ignore[attr-defined]
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        item = ast.withitem(ast.Name("__case__", ast.Load()), None)
        return ast.copy_location(ast.With([item], [node]), node)
