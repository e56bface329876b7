"""Laws of the source: allowed imports between packages, sizes, checkers."""

import ast
import itertools
import os
import re
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import grimp
import networkx
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_rl"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_FUNCTION_LINES, MAX_FILE_LINES, MEDIAN_PUBLIC_NAMES = 60, 450, 4
PURE = ("algorithms", "config", "families", "desk/costs", "desk/simulate", "graders/answers", "graders/analysis", "schedule")
"""Code that also runs without a process group: it does not mention torch.distributed."""
WINGS = ("desk", "graders", "cpu")
"""The core can do without them."""
WITHOUT_SUBJECT = re.compile(
    "(Of|What|Whether|Those|That|By|Where|As|Which|Who|Whose|It|Its|None|Until)\\b|One (of|per|a|that)\\b"
)
NOT_OUR_WORDS = ("heed", "whoever", "somebody", "anew", "give way", "otherwise than", "in the place of", "put together", "likeliest")
BUDGETS = """
room            lines files classes
whole           76766   464     658
core            55544   348     517
.                 181     4       5
agents           3155    16      38
algorithms       3356    24      17
config           4186    19      76
data             3870    15      27
environments      553     4      10
families         2417    27      27
models           5690    28      54
parallel          950     6      11
rewards          4174    27      34
rollout          6387    31      56
run              1480     7       8
schedule          447     3       7
selection        1274     5      10
step             4073    39      28
supervised        750     5       6
system           3252    29      33
tracking         1810    10      15
training         4120    17      27
weights          2054    10      28
commands         1365    22       0
desk                1     1       0
desk/costs       1282     7      13
desk/doctor      3044    16      13
desk/plan        2225    11      11
desk/report      1777     9       8
desk/simulate    2945    16      25
desk/watch        872     5       5
graders             2     1       0
graders/answers  1520     7       8
graders/analysis 1742     9       9
graders/sandbox  3361    16      32
cpu              2451    18      17
"""
"""At most so many lines, files and classes; a room that outgrows its row is split or simplified before the row is raised."""

def run(*arguments: str) -> str:
    """Run a checker; return its output if it finds a problem, otherwise ""."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    return done.stdout + done.stderr if done.returncode else ""


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}


def test_imports_go_to_lower_layers_only() -> None:
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_packages_have_no_import_cycles() -> None:
    """No cycle among the files and folders of a package or of any folder in it; imports for types count too."""
    graph = grimp.build_graph("megatron_rl", cache_dir=None)
    edges = [(module, name) for module in graph.modules for name in graph.find_modules_directly_imported_by(module)]
    found = set()
    for folder in graph.modules:
        inside = [edge for edge in edges if all(name.startswith(f"{folder}.") for name in edge)]
        siblings = [tuple(f"{folder}.{name[len(folder) + 1 :].split('.')[0]}" for name in edge) for edge in inside]
        circles = networkx.strongly_connected_components(networkx.DiGraph(siblings))
        found |= {frozenset(circle) for circle in circles if len(circle) > 1}
    assert found == set()


def test_cpu_code_is_entered_at_one_place() -> None:
    """The other entry is in pyproject.toml, where SGLang finds its platform."""
    graph = grimp.build_graph("megatron_rl", cache_dir=None)
    importers = {module for name in graph.find_descendants("megatron_rl.cpu") for module in graph.find_modules_that_directly_import(name)}
    assert {module for module in importers if not module.startswith("megatron_rl.cpu")} == {"megatron_rl"}


def test_the_core_imports_no_desk_and_graders_for_three_rewards_only() -> None:
    command = [sys.executable, "-m", "tests.no_wings", "desk", "graders"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == [f"megatron_rl.rewards.rules.{name}" for name in ("choice", "code", "math")]


def test_packages_keep_their_budgets(trees: dict[Path, ast.Module]) -> None:
    sizes: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for path, tree in trees.items():
        own = (len(_lines(path)), 1, sum(isinstance(node, ast.ClassDef) for node in ast.walk(tree)))
        parts = path.relative_to(PACKAGE).parts
        room = parts[0] if len(parts) > 1 else "."
        part = "/".join(parts[:2]) if room in WINGS and len(parts) > 2 else room
        for name in (part, "whole", *(() if room in WINGS else ("core",))):
            sizes[name] = [a + b for a, b in zip(sizes[name], own, strict=True)]
    budgets = {name: [int(number) for number in numbers] for name, *numbers in map(str.split, BUDGETS.strip().splitlines()[1:])}
    assert sizes.keys() == budgets.keys()
    pairs = {name: list(zip(size, budgets[name], strict=True)) for name, size in sizes.items()}
    assert {name: pair for name, pair in pairs.items() if any(found > most for found, most in pair)} == {}


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


def test_modules_have_few_public_names(trees: dict[Path, ast.Module]) -> None:
    numbers = {path: len([name for name in _names(tree) if not name.startswith("_")]) for path, tree in trees.items()}
    assert statistics.median(numbers.values()) <= MEDIAN_PUBLIC_NAMES


def test_file_names_are_unique() -> None:
    """Two files called ``registry.py`` would be ambiguous in a search."""
    places = defaultdict(list)
    for path in MODULES:
        if path.name != "__init__.py" and path.parent.name != "stages":  # these have the stages' names
            places[path.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_a_public_class_name_has_one_meaning(trees: dict[Path, ast.Module]) -> None:
    names = [node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert [name for name, number in Counter(names).items() if number > 1 and not name.startswith("_")] == []


def test_docstrings_have_a_subject_of_their_own(trees: dict[Path, ast.Module]) -> None:
    """A reader of one docstring must not need the line above it to find out what the sentence is about."""
    tests = [path for folder in ("", "gpu", "integration") for path in (ROOT / "tests" / folder).glob("*.py")]
    bad = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path, tree in {**trees, **{path: ast.parse(path.read_text(encoding="utf-8")) for path in tests}}.items()
        for text in _docstrings(tree)
        if WITHOUT_SUBJECT.match(text)
    ]
    assert bad == []


@pytest.mark.parametrize("words", NOT_OUR_WORDS)
def test_texts_use_the_words_of_the_field(words: str) -> None:
    pattern = re.compile(rf"\b{words}\b", re.IGNORECASE)
    paths = [*MODULES, *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
    assert [path.name for path in paths if pattern.search(path.read_text(encoding="utf-8"))] == []


def test_requirements_name_what_is_imported(trees: dict[Path, ast.Module]) -> None:
    """torch and SGLang come in different builds for CPU and GPU machines: their pins are in cpu.txt, gpu.txt, sglang.txt."""
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


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """Docstrings of the module, its classes and functions, and the texts under fields and constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
            for field, below in itertools.pairwise(node.body):
                value = below.value if isinstance(field, ast.Assign | ast.AnnAssign) and isinstance(below, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.value.strip()


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
