"""Composes the code to run from a response, a prompt and tests: pure functions on source text.

Invariants: a response that defines the entry point is a whole program (only the part of the prompt before the entry
point's definition is put in front); any other response continues the prompt. Helpers of the prompt that tests use come
from the prompt, never from the response. No code of a response runs here, but compiling it may exhaust memory or the
parser's stack, so only processes of the sandbox compile.
"""

import ast
import builtins
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import CodeType

from megatron_rl.graders.analysis.blind_spots import expected_in
from megatron_rl.graders.analysis.check_marks import MarkChecks, Owed, OwedChecks
from megatron_rl.graders.analysis.library import library_names
from megatron_rl.graders.analysis.oracles import Oracles
from megatron_rl.graders.analysis.sides import Sides
from megatron_rl.graders.analysis.value_flow import (
    ASSERTIONS,
    called,
    class_uses,
    identifiers,
    imported_from_solution,
    names_loaded,
    names_of,
    names_stored,
    walk,
)

_ONE_INTERPRETER = {
    "asyncio", "await", "inspect", "mock", "patch", "MagicMock", "monkeypatch", "stdin", "argv", "environ", "builtins", "globals", "gc",
    "importlib", "warns", "recwarn", "assertWarns", "assertWarnsRegex", "assertLogs", "assertNoLogs", "caplog", "capfd", "__cause__",
    "__context__", "__notes__", "__traceback__",
}  # fmt: skip
"""Names in tests that need the interpreter of the tested code."""
_RUNS_TEXT = {"exec", "pickle", "marshal", "dill", "cloudpickle", "runpy", "sympify", "parse_expr", "__import__"}
_CAN_FAIL = re.compile(rf"_*(?:{'|'.join(ASSERTIONS)}|raises|fail|exit|quit)", re.IGNORECASE)


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
    sides: Sides | None
    """Sides of comparisons, if they are recorded."""
    use_arrays: bool
    """True if the tests use numpy, or another library of arrays."""
    expected: frozenset[str]
    """Values that ``blind_spots`` notices and these tests would show."""
    expect_errors: bool
    """True if the tests handle exceptions."""
    hide_errors: bool
    """True if a class of the tests has a method whose exceptions Python swallows (``_HIDING``), or the tests swallow any in a check."""
    doubt: str
    """A use of the program's names that no verdict can rest on; "" if there is none."""
    owed: list[Owed]
    """Checks that tests which hold have made."""
    raising_lines: frozenset[int]
    """Lines of statements ``raise`` that stand in a ``with``, under no condition."""
    num_asserts: int
    """Number of asserts in the source; a loop may run one assert several times."""
    lines: tuple[str, ...]
    functions: tuple[str, ...]
    """Functions ``test_...`` and classes of tests, in the order of the source."""
    words: frozenset[str]
    """Identifiers that the tests read."""

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
        elif _is_stub(node):  # also for the response to write
            continue
        elif not isinstance(node, ast.Expr) and (not is_after or (is_helper and root not in names_of(node))):
            kept.append(node)
    return kept


def _is_stub(node: ast.stmt) -> bool:
    """True for a function of nothing but a docstring, ``pass``, ``...`` or NotImplementedError."""
    return isinstance(node, ast.FunctionDef) and all(
        isinstance(each, ast.Pass)
        or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        or (isinstance(each, ast.Raise) and "NotImplementedError" in names_of(each))
        for each in node.body
    )


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


def _defined(body: Sequence[ast.stmt]) -> set[str]:
    """Names that statements bind in their module, and the methods of ``Solution``."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
            if node.name == "Solution":  # LeetCode's tests call its methods
                names |= {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
        else:
            names |= _bound(node)
    return names


def _bound(tree: ast.AST) -> set[str]:
    """Names that assignments, definitions and imports bind."""
    found = names_stored(tree)
    for node in walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found


# -------------------------------------------------------------------------------------------------------------- tests


def read_tests(
    text: str,
    *,
    setup: str = "",
    prompt_code: str = "",
    entry_point: str = "",
    defined: Collection[str] = (),
    records_sides: bool = False,
) -> Tests:
    """Compile tests: statements with ``assert``, ``check(candidate)`` as HumanEval has it, functions ``test_...``, or
    ``unittest`` cases. ``setup`` runs before the tests, and ``defined`` are names that the program defines. With
    ``records_sides`` the sides of comparisons are recorded (sides.py).

    Raises:
        InvalidTests: tests that do not compile, test nothing, or need the program's interpreter.
    """
    try:
        tree, before = ast.parse(text), ast.parse(setup)
        shared = _prelude_statements(prompt_code, entry_point)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidTests(f"the tests do not compile: {error}") from error
    own = _complete(tree, text, entry_point)
    loaded = {node.id for node in walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    known = own | _defined(before.body) | _defined(shared) | _RUN_PROGRAM
    checked = {part for node in walk(tree) if called(node) == "check" for part in node.args[:1]}  # type: ignore[attr-defined]
    entry = ({root_of(entry_point)} | {part.id for part in checked if isinstance(part, ast.Name)}) - {""} - known
    names = frozenset((loaded - known - set(dir(builtins)) - {"__name__", "__file__"}) | entry)
    program_names = names - _bound_somewhere(tree)
    library = library_names(tree, program_names - entry)
    oracles = Oracles(tree, program_names - {name for name, is_module in library.items() if is_module})
    tested, direct = oracles.checked_alone()
    if program_names - library.keys():  # otherwise what is tested has a name of the library
        tested = frozenset(name for name in direct if name in defined and not name[:1].isupper())
    elif len(program_names) == 1 and not loaded & _RUN_PROGRAM:
        tested = program_names & {*defined}
    library = {name: is_module for name, is_module in library.items() if name not in tested}
    names, program_names = names - library.keys(), program_names - library.keys()
    oracles.forget(library)
    imported = imported_from_solution(tree)
    error_uses = [node for is_error, node in class_uses(tree) if is_error]
    errors = names_of(*error_uses) & (program_names | imported)
    constants = program_names - _used_as_functions(tree) - entry - errors - {"candidate"}
    _check_runnable(tree, names, constants, prompt_code)
    # ``assert False`` stands where no right program gets to.
    num_asserts = sum(isinstance(node, ast.Assert) and not _is_false(node.test) for node in walk(tree))
    functions = tuple(dict.fromkeys(_tests_in(tree)))
    imported -= _used_as_functions(tree)
    doubt = _doubt(tree, program_names | imported, constants | imported, oracles, root_of(entry_point))
    sides = oracles.sides() if records_sides else None
    use_arrays = bool(_ARRAYS.search(f"{prompt_code}\n{setup}\n{text}"))
    words = frozenset(identifiers(tree))
    expected = expected_in(f"{setup}\n{text}", prompt_code, walk(tree, before, *shared), oracles.compares_sums())
    owed = OwedChecks(tree, oracles, words.union(functions))
    hide_errors = any((isinstance(node, ast.FunctionDef) and node.name in _HIDING) or _swallows(node) for node in walk(tree))
    try:
        code = compile(ast.fix_missing_locations(MarkChecks(oracles, owed, sides, use_arrays).visit(tree)), "<tests>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidTests(f"the tests do not compile: {error}") from error
    habits = (sides, use_arrays, frozenset(expected), bool(error_uses), hide_errors, doubt, owed.all, _raising_lines(tree), num_asserts)
    return Tests(code, names, constants, errors, library, *habits, tuple(text.splitlines()), functions, words)


def _complete(tree: ast.Module, text: str, entry_point: str) -> set[str]:
    """Add the call of ``check(candidate)``, and take out calls of test runners; returns the names that the tests define."""
    tree.body = [_asserted(inner) for node in tree.body for inner in _as_script(node) if not _is_runner(inner, text)]
    own = _defined(tree.body)
    if not any(_can_fail(node, own) for node in walk(*tree.body)) or any(map(_is_tuple, walk(*tree.body))):
        raise InvalidTests("the tests assert nothing")
    callers = [node for node in tree.body if _names_test(node) or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    if "check" in own - names_of(*callers):
        if not entry_point:
            raise InvalidTests("the tests define check(candidate), but the entry_point to give to it is missing")
        tree.body += ast.parse(f"if check({entry_point}) is False:\n    raise AssertionError('check returned False')").body
    return own


def _raising_lines(tree: ast.Module) -> frozenset[int]:
    of_with = [each for node in walk(tree) if isinstance(node, ast.With) for each in node.body]
    own = [each for each in of_with if isinstance(each, ast.Expr) and not names_loaded(each)]  # 1 / 0
    return frozenset(each.lineno for each in of_with if isinstance(each, ast.Raise) or each in own)


_HIDING = ("__getattr__", "__getattribute__", "__getitem__")
"""Methods whose IndexError ends a loop, and whose AttributeError is no attribute to ``hasattr`` and ``getattr``."""


def _swallows(node: ast.AST) -> bool:
    """True for a ``try`` or ``with suppress`` in which an exception skips an assert unseen."""
    if isinstance(node, ast.Try):
        # An exception that no test expects gives the value which another assignment would take from the program.
        lost = [each for each in node.handlers if each.type and names_of(each.type) & {"RecursionError", "MemoryError"}]
        if names_stored(*lost) & names_stored(*node.body):
            return True
        silent = [each for each in node.handlers if not any(isinstance(inner, ast.Raise | ast.Assert) for inner in walk(each))]
        caught: list[ast.AST] = [each.type or ast.Name("Exception") for each in silent]
    elif isinstance(node, ast.With):
        caught = [part for is_error, part in class_uses(*node.items) if is_error]
    else:
        return False
    return bool(caught) and any(
        not _is_false(inner.test) if isinstance(inner, ast.Assert) else re.match("assert(?!Raises)", getattr(inner, "attr", ""))
        for inner in walk(node)
    )


_RUN_PROGRAM = {"run_program"}
"""Functions that the tests may call to run the program as a script: run_program(input text) -> printed text."""


def _check_runnable(tree: ast.AST, names: frozenset[str], constants: frozenset[str], prompt: str) -> None:
    """Reject tests that cannot run with any program. Raises InvalidTests."""
    used = identifiers(tree) - (names_stored(tree) & {"patch", "mock"})
    patched = [node.args[0] for node in walk(tree) if called(node) == "patch" and node.args]  # type: ignore[attr-defined]
    if patched and all(getattr(each, "value", None) in ("sys.stdout", "sys.stderr") for each in patched):
        used = used - {"mock", "patch"}
    if shared := used & _ONE_INTERPRETER or ({"catch_warnings"} if used >= {"catch_warnings", "record"} else set()):
        raise InvalidTests(f"the tests need the program's interpreter ({min(shared)}), which they do not share")
    if runs := used & _RUNS_TEXT:
        raise InvalidTests(f"the tests may run what the program gives ({min(runs)})")
    if names_of(*(node for is_error, node in class_uses(tree) if not is_error)) & names:
        raise InvalidTests("the tests use a class of the program in isinstance or as a base: it stays with the program")
    guarded = {id(inner) for node in walk(tree) if isinstance(node, ast.Try) for inner in walk(node)}
    for node in walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in guarded:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or "."]
            for module in {name.partition(".")[0] for name in modules} - {"solution"}:
                if not module or find_spec(module) is None:
                    raise InvalidTests(f"the tests import {module or 'a relative module'}, which is not installed")
    unknown = [name for name in sorted(constants) if not re.search(rf"\b{name}\b", prompt)]
    if unknown and constants != names:
        raise InvalidTests(f"the tests read {unknown[0]}, which neither they nor the prompt define")


_ARRAYS = re.compile(r"\b(?:numpy|np|pandas|pd|torch|scipy|jax|tensorflow)\b")


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def _is_tuple(node: ast.AST) -> bool:
    """True for what always holds: an assert of a tuple, ``assert (f(1) == 2, "message")``, or a tuple as a statement."""
    return isinstance(node, ast.Assert | ast.Expr) and isinstance(getattr(node, "test", getattr(node, "value", None)), ast.Tuple)


def _doubt(tree: ast.Module, names: frozenset[str], constants: frozenset[str], oracles: Oracles, tested: str) -> str:
    """The reason why the tests are in doubt: the program would choose the value that it is compared with."""
    for node in walk(tree):
        if isinstance(node, ast.stmt):
            parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
            used = names_of(*parts) & names
            read = sorted(used & constants)
            if read and (not isinstance(node, ast.Assert) or used - constants):
                return f"the tests use the program's own {read[0]} to check it"
    if oracle := oracles.unpinned(tested):
        return f"the tests use the program's own {oracle} to check it"
    conversion = oracles.conversions()
    return f"the tests convert what the program gives to what it may choose: {conversion:.80}" if conversion else ""


def _used_as_functions(tree: ast.AST) -> set[str]:
    """Names that the code calls, passes as arguments, uses as decorators or reads attributes of."""
    found: set[str] = set()
    for node in walk(tree):
        used = [node.func, *node.args, *(word.value for word in node.keywords)] if isinstance(node, ast.Call) else []
        used += [node.value] if isinstance(node, ast.Attribute) else getattr(node, "decorator_list", [])
        found |= {inner.id for inner in used if isinstance(inner, ast.Name)}
    return found


def _bound_somewhere(tree: ast.AST) -> set[str]:
    """Names bound as local variables, parameters, imports and the like."""
    parameters = {node.arg for node in walk(tree) if isinstance(node, ast.arg)}
    return _bound(tree) | parameters | {node.name or "" for node in walk(tree) if isinstance(node, ast.ExceptHandler)}


def _asserted(node: ast.stmt) -> ast.stmt:
    """Turn a comparison as a statement (``f(1) == 2``) into an assert."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Compare):
        return ast.copy_location(ast.Assert(node.value, None), node)
    return node


def _can_fail(node: ast.AST, own: set[str]) -> bool:
    """True for what fails if the program is wrong: an assert, an error, or the result of a test."""
    if _names_test(node) or getattr(node, "name", "") == "check":
        return any(isinstance(inner, ast.Return) and inner.value for inner in walk(node))
    return isinstance(node, ast.Assert | ast.Raise) or (called(node) not in own and bool(_CAN_FAIL.match(called(node))))


def _as_script(node: ast.stmt) -> list[ast.stmt]:
    """The statements of ``if __name__ == "__main__"``, which a script runs; ``node`` itself otherwise."""
    is_guard = isinstance(node, ast.If) and names_of(node.test) == {"__name__"}
    return node.body if is_guard else [node]  # type: ignore[attr-defined]


def _is_runner(node: ast.stmt, text: str) -> bool:
    """True for ``unittest.main()``, ``pytest.main()`` and ``sys.exit(0)``: the tests run anyway."""
    called = ast.unparse(node) if isinstance(node, ast.Expr) else ""
    is_main = called.startswith("main(") and re.search(r"from unittest import .*\bmain\b", text)
    return bool(is_main or re.search(r"\b(?:unittest|pytest)\.main\(|^(?:sys\.)?(?:exit|quit)\(0?\)$", called))


def _tests_in(tree: ast.Module) -> Iterator[str]:
    """Names of the functions ``test...`` and of the classes of tests."""
    cases: set[str] = set()
    for node in _outside_functions(tree.body):
        if isinstance(node, ast.ClassDef):
            if any(name in cases or name.endswith("TestCase") for base in node.bases for name in identifiers(base)):
                cases.add(node.name)
            if node.name in cases or (node.name.startswith("Test") and any(map(_names_test, node.body))):
                yield node.name
        elif _names_test(node):
            yield node.name  # type: ignore[attr-defined]


def _outside_functions(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Statements of a module, also those inside ``if``, ``try`` and the like."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from _outside_functions(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.excepthandler))


def _names_test(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test")
