"""The laws of the source itself: which room may import which, how long things may be, what the checkers find."""

import ast
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_rl"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_FUNCTION_LINES, MAX_FILE_LINES, MEDIAN_PUBLIC_NAMES = 60, 450, 4
PURE = ("algorithms", "config", "families", "desk/costs", "desk/simulate", "graders/answers", "schedule")
"""What also runs where no process group is: these name torch.distributed nowhere."""


def run(*arguments: str) -> str:
    """What a checker prints where it finds something, or ""."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    return done.stdout + done.stderr if done.returncode else ""


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}


def test_imports_go_down_the_floors() -> None:
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing() -> None:
    assert run("ruff", "check", "--no-cache", ".") == ""


@pytest.mark.timeout(600)
def test_types_agree(tmp_path: Path) -> None:
    assert run("mypy", "--cache-dir", str(tmp_path)) == ""


def test_functions_and_files_are_short_enough_to_read(trees: dict[Path, ast.Module]) -> None:
    found = [f"{path.relative_to(ROOT)}: {n} lines" for path in MODULES if (n := len(_lines(path))) > MAX_FILE_LINES]
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    found.append(f"{path.relative_to(ROOT)}: {node.name} has {length} lines")
    assert not found, found


def test_a_module_shows_few_names(trees: dict[Path, ast.Module]) -> None:
    numbers = {path: len([name for name in _names(tree) if not name.startswith("_")]) for path, tree in trees.items()}
    assert statistics.median(numbers.values()) <= MEDIAN_PUBLIC_NAMES


def test_a_file_name_stands_for_one_thing() -> None:
    """``registry.py`` of rewards and of environments would be two things to search among."""
    places = defaultdict(list)
    for path in MODULES:
        if path.name != "__init__.py" and path.parent.name != "stages":  # these have the stages' names
            places[path.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_requirements_name_what_is_imported(trees: dict[Path, ast.Module]) -> None:
    """torch and SGLang come in different builds for CPU and GPU machines: their pins stand in cpu.txt, gpu.txt, sglang.txt."""
    lines = (ROOT / "requirements" / "common.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("-", "_") for line in lines if "==" in line}
    imported = {name for tree in trees.values() for name in _imported(tree)} - set(sys.stdlib_module_names)
    package_of = {"PIL": "pillow", "yaml": "pyyaml", "megatron": "megatron_core"}
    needed = {package_of.get(name, name).lower() for name in imported - {"megatron_rl", "torch", "sglang"}}
    assert needed - pinned == set()


@pytest.mark.parametrize("room", PURE)
def test_pure_code_names_no_process_group(room: str) -> None:
    paths = sorted((PACKAGE / room).rglob("*.py")) if (PACKAGE / room).is_dir() else [PACKAGE / room]
    assert paths
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            assert not [name for name in names if name.startswith("torch.distributed")], path


def test_unit_tests_mirror_the_package() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    folders = {path.name for path in (ROOT / "tests" / "unit").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - rooms <= {"docs", "examples", "launch", "tools"}
    assert not list((ROOT / "tests" / "unit").glob("test_*.py"))


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _names(tree: ast.Module) -> list[str]:
    """Functions, classes and variables that a module defines at its top."""
    names = [
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names


def _imported(tree: ast.Module) -> list[str]:
    """Packages that a module imports, at its top or inside functions."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    return [name.split(".")[0] for name in names]
