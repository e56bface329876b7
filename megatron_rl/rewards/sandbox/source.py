"""From the code of a response, a prompt and tests to what is run: pure functions on source text.

Invariants: a response that defines the entry point is a whole program (only what the prompt has before the entry point's
definition goes in front of it); any other response continues the prompt. Helpers of the prompt that tests use come from
the prompt, never from the response. Nothing here runs code of a response, but compiling it may exhaust memory or the
parser's stack: only processes of the sandbox do that.
"""

import ast
import builtins
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import TypeGuard

_ONE_INTERPRETER = {
    "asyncio", "await", "inspect", "mock", "patch", "MagicMock", "monkeypatch", "capsys", "redirect_stdout", "stdout",
    "stdin", "globals", "gc", "importlib",
}  # fmt: skip
"""Names in tests that look into the interpreter of the tested code."""


class BadTests(ValueError):
    """Tests that cannot be run whatever the response: the data is at fault."""


@dataclass(frozen=True)
class Tests:
    code: CodeType
    names: frozenset[str]
    """What the tests take from the tested code."""
    num_asserts: int
    """In the source; loops may run one more than once."""
    lines: tuple[str, ...]
    functions: tuple[str, ...]
    """Functions ``test_...`` without parameters, and test case classes, in the order of the source."""
    one_interpreter: bool
    """They can only run in the interpreter of the tested code."""


# ------------------------------------------------------------------------------------------------------------ program


def compose(code: str, prompt_code: str, entry_point: str) -> list[CodeType]:
    """What to execute, one after the other, in one namespace.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: from the compiler, for code that is no Python.
    """
    alone = _try_compile(code)
    if alone is not None and (not entry_point or entry_point in _defined(ast.parse(code).body)):
        return [*prelude(prompt_code, entry_point), alone]
    if prompt_code:
        for text in _continuations(prompt_code, code):
            whole = _try_compile(text)
            if whole is not None and (not entry_point or entry_point in _defined(ast.parse(text).body)):
                return [whole]
    return [*prelude(prompt_code, entry_point), compile(code, "<solution>", "exec")]


def _continuations(prompt_code: str, code: str) -> Iterator[str]:
    """The prompt continued by ``code``, as it stands first, then with the indentation corrected."""
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
    """What a prompt has before the definition of ``entry_point``: imports and helpers. Nothing, for a prompt in words."""
    kept = _prelude_statements(prompt_code, entry_point)
    return [compile(ast.Module(kept, []), "<prompt>", "exec")] if kept else []


def _prelude_statements(prompt_code: str, entry_point: str) -> list[ast.stmt]:
    kept = []
    for node in _prompt_statements(prompt_code):
        if entry_point in _defined([node]):
            break
        if not isinstance(node, ast.Expr):
            kept.append(node)
    return kept


def _prompt_statements(prompt_code: str) -> list[ast.stmt]:
    """A prompt may end within a function that it has only begun; a prompt in words has no statements."""
    for text in (prompt_code, f"{prompt_code}\n    pass"):
        try:
            return ast.parse(text).body
        except (SyntaxError, ValueError):
            continue
    return []


def infer_entry_point(prompt_code: str) -> str:
    """The last function that a prompt begins; "" if it begins none."""
    statements = _prompt_statements(prompt_code)
    names = [node.name for node in statements if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return names[-1] if names else ""


def _defined(body: Sequence[ast.stmt]) -> set[str]:
    """Names that statements bind in their module."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
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


def read_tests(
    tests: str | Sequence[str], *, setup: str = "", prompt_code: str = "", entry_point: str = "", partial: bool = False
) -> Tests:
    """Compile tests: statements with ``assert``, ``check(candidate)`` as HumanEval has it, functions ``test_...``, or
    ``unittest`` cases.

    Args:
        setup: Runs before the tests, and before the tested code too.
        partial: Count failing asserts instead of stopping at the first one.

    Raises:
        BadTests: tests that do not compile, test nothing, or need an entry point that is not known.
    """
    text = tests if isinstance(tests, str) else "\n".join(tests)
    try:
        tree = ast.parse(text)
        before = ast.parse(setup)
        shared = _prelude_statements(prompt_code, entry_point)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise BadTests(f"the tests do not compile: {error}") from error
    if not any(isinstance(node, (ast.Assert, ast.Call, ast.Compare, ast.Raise)) for node in ast.walk(tree)):
        raise BadTests("the tests assert nothing")
    defined = _defined(tree.body)
    if "check" in defined and not _calls_check(tree.body):
        if not entry_point:
            raise BadTests("the tests define check(candidate), but the entry_point to give to it is missing")
        tree.body.append(ast.parse(f"check({entry_point})").body[0])
    tree.body = [_asserted(node) for node in tree.body]
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    known = defined | _defined(before.body) | _defined(shared) | set(dir(builtins))
    names = (loaded - known) | ({entry_point} if entry_point and entry_point not in defined else set())
    num_asserts = sum(isinstance(node, ast.Assert) for node in ast.walk(tree))
    one_interpreter = bool(_identifiers(tree) & _ONE_INTERPRETER) or _names_classes(tree, names)
    if partial:
        tree = _CountAsserts().visit(tree)
    try:
        code = compile(ast.fix_missing_locations(tree), "<tests>", "exec")
    except (SyntaxError, ValueError, RecursionError) as error:
        raise BadTests(f"the tests do not compile: {error}") from error
    functions = [node.name for node in tree.body if _is_test(node)]
    return Tests(code, frozenset(names), num_asserts, tuple(text.splitlines()), tuple(functions), one_interpreter)


def _calls_check(body: Sequence[ast.stmt]) -> bool:
    statements = [node for node in body if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
    return any(
        isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "check"
        for node in statements
        for inner in ast.walk(node)
    )


def _asserted(node: ast.stmt) -> ast.stmt:
    """A comparison as a statement (``f(1) == 2``) is meant as an assert."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Compare):
        return ast.copy_location(ast.Assert(node.value, None), node)
    return node


def _is_test(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.ClassDef]:
    if isinstance(node, ast.FunctionDef):
        required = len(node.args.args) + len(node.args.posonlyargs) - len(node.args.defaults)
        return node.name.startswith("test") and required == 0
    return isinstance(node, ast.ClassDef) and any("TestCase" in ast.unparse(base) for base in node.bases)


def _identifiers(tree: ast.AST) -> set[str]:
    """Names, attributes, imports and parameters; ``await`` stands for whatever is asynchronous."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found |= set(node.name.split("."))
        elif isinstance(node, (ast.Await, ast.AsyncFunctionDef)):
            found.add("await")
    return found


def _names_classes(tree: ast.AST, names: frozenset[str] | set[str]) -> bool:
    """Whether tests use a name of the tested code as a class of exceptions or as a base class."""

    def uses(node: ast.AST | None) -> bool:
        return node is not None and any(isinstance(inner, ast.Name) and inner.id in names for inner in ast.walk(node))

    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and uses(node.type):
            return True
        if isinstance(node, ast.ClassDef) and any(uses(base) for base in node.bases):
            return True
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("raises", "assertRaises", "issubclass") and node.args and uses(node.args[0]):
                return True
    return False


class _CountAsserts(ast.NodeTransformer):
    """``assert x`` becomes ``with __case__: assert x``; the context manager counts and swallows the failure."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        item = ast.withitem(ast.Name("__case__", ast.Load()), None)
        return ast.copy_location(ast.With([item], [node]), node)
