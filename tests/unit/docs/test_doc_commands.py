"""Every command on a page is accepted by its program, and every recipe on a page loads.

Bash runs blocks and inline code with programs replaced by scripts that record their arguments; these are then checked
with the real parsers, schemas and files. A program that is neither replaced nor listed fails the test, so a new kind of
command cannot be overlooked. ``tests/integration/test_tutorial.py`` runs docs/tutorial.md.
"""

import ast
import contextlib
import io
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_rl.cli import _parse
from megatron_rl.commands import COMMANDS
from megatron_rl.config.checks import check_config
from megatron_rl.config.load import load_config
from megatron_rl.config.schema.commands import RL_COMMANDS
from megatron_rl.desk.costs.gpus import gpu
from megatron_rl.desk.simulate.lengths import named_lengths
from megatron_rl.errors import ConfigError
from tests.unit.docs.fences import PAGES, ROOT, Code, fences, prose, spans

COMMAND_PAGES = [page for page in PAGES if page.name != "CHANGELOG.md"]
"""A changelog may contain commands of earlier versions."""
LANGUAGES = {"bash", "text", "python", "yaml", "json"}
ELSEWHERE = {
    "apptainer": "makes an image of a cluster's own kind",
    "cat": "shows a file",
    "docker": "tests/unit/docs/test_dockerfile.py looks at what it builds",
    "git": "another repository's commit",
    "hostname": "of the machine",
    "ibstat": "names network cards",
    "ip": "names network interfaces",
    "mkdir": "of the shell",
    "mkdocs": "tests/unit/docs/test_site.py builds the site",
    "pytest": "runs these tests",
}
"""Programs whose arguments are not checked, with the reason."""
NOT_RUN = {
    ".ci/": "its scripts set everything up for the whole suite",
    "launch/setup.sh": "installs packages; tests/unit/examples/test_setup_script.py",
    "launch/slurm.sbatch": "needs SLURM; tests/unit/tools/test_launch_env.py",
    "examples/": "tests/unit/examples/test_run_scripts.py and test_judge_script.py run them",
}
"""Scripts of which only the flags are checked, against their text; other scripts run with the replaced programs."""
PROGRAMS = ("megatron-rl", "python", "pip", "bash", "sbatch", "pdsh", *ELSEWHERE)
IN_VENV = ("megatron-rl", "python", "pip", "mkdocs")
NOTE = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" >> "$NOTES"; printf '\\036\\0' >> "$NOTES"
"""
BEFORE = """
cd() { :; }; ulimit() { :; }; source() { :; }
command_not_found_handle() { echo "$1 is not in PROGRAMS of this test" >&2; return 127; }
set -e
"""
READERS = "recipe.yaml"
"""Name of the reader's own recipe on a page."""
STAND_INS = {
    "": "examples/gpu/tppo.yaml",
    "dpo": "examples/reward_models/dpo.yaml",
    "label-lines": "examples/reward_models/label_lines.yaml",
    "reward-train": "examples/reward_models/bradley_terry.yaml",
    "select-prompts": "examples/prompt_selection/select.yaml",
}
"""Recipes of the repository in place of the reader's, by command."""
USERS_OWN = re.compile(r"does not exist|config\.json|there is no folder /shared")
"""Errors that are allowed because the files are the reader's."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fake_root(tmp_path_factory.mktemp("root"))


def fake_root(root: Path) -> Path:
    """Make ``root`` the repository's root as a command sees it, without a .venv that does anything."""
    for name in (".ci", "examples", "launch", "megatron_rl", "requirements", "tests", "tools"):
        (root / name).symlink_to(ROOT / name)
    for place, names in ((root / "bin", PROGRAMS), (root / ".venv" / "bin", IN_VENV)):
        place.mkdir(parents=True)
        for name in names:
            (place / name).write_text(NOTE)
            (place / name).chmod(0o755)
    (root / "docs").mkdir()
    shutil.copy(ROOT / STAND_INS[""], root / READERS)
    return root


def noted(folder: Path, words: list[str], path: str) -> list[list[str]]:
    """Arguments of every program that ``words`` call."""
    notes = folder / "notes"
    notes.unlink(missing_ok=True)
    environment = {"PATH": path, "NOTES": str(notes), "HOME": str(folder), "PWD": str(folder), "LANG": "C.UTF-8"}
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{words}: {done.stderr}"
    text = notes.read_text() if notes.exists() else ""
    return [call.split("\0")[:-1] for call in text.split("\x1e\0")[:-1]]


def called(folder: Path, shell: str) -> list[list[str]]:
    """Calls of a shell text; no other program is on its path."""
    return noted(folder, ["/bin/bash", "-c", BEFORE + shell], str(folder / "bin"))


def check(call: list[str], code: Code, folder: Path) -> None:
    """Raises AssertionError for a call that its program would refuse."""
    program, *words = call
    words = [word for word in words if not is_placeholder(word)]
    if not words:
        return
    if program == "megatron-rl":
        check_megatron_rl(words, code, folder)
    elif program == "python":
        check_python(words, code, folder)
    elif program == "pip":
        wanted = [value for flag, value in itertools.pairwise(words) if flag == "-r"]
        assert all((ROOT / name).is_file() for name in wanted), f"{code}: {wanted}"
    elif program == "bash":
        check_script(words, code, folder)
    elif program == "sbatch":
        place = next((n for n, word in enumerate(words) if word.endswith(".sbatch")), None)
        if place is not None:
            assert (ROOT / words[place]).is_file(), f"{code}: {words[place]} does not exist"
            check_megatron_rl(words[place + 1 :], code, folder)
    elif program == "pdsh":
        check_all(called(folder, words[-1]), code, folder)
    else:
        assert ELSEWHERE[program]


def check_all(calls: list[list[str]], code: Code, folder: Path) -> None:
    for call in calls:
        check(call, code, folder)


def is_placeholder(word: str) -> bool:
    return word.startswith("[") or (word.endswith("...") and " " not in word) or (word.endswith("...]") and "=" not in word)


def check_megatron_rl(words: list[str], code: Code, folder: Path) -> None:
    if words == ["--version"]:
        return
    assert words[0] in COMMANDS, f"{code}: megatron-rl has no command {words[0]}; it has {', '.join(COMMANDS)}"
    if code.language == "span":
        check_flags(words, code)
        return
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            arguments = _parse(words)
    except SystemExit:
        pytest.fail(f"{code}: {' '.join(words)}: {told.getvalue().splitlines()[-1]}")
    given = vars(arguments)
    if ":" in (given.get("lengths") or ""):
        named_lengths(given["lengths"])
    if given.get("gpu"):
        gpu(given["gpu"])
    check_recipe(words, given, code, folder)


def check_flags(words: list[str], code: Code) -> None:
    """Check the flags of inline code, which may omit required arguments."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
        _parse([words[0], "--help"])
    known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", told.getvalue()))
    unknown = [word for word in words[1:] if word.startswith("-") and word.split("=")[0] not in known]
    assert not unknown, f"{code}: megatron-rl {words[0]} has no {', '.join(unknown)}"


def check_recipe(words: list[str], arguments: dict, code: Code, folder: Path) -> None:
    """Check the recipe with its overrides, except for the reader's files."""
    given = [*arguments.get("overrides", []), *arguments.get("words", [])]
    recipes = [*(arguments.get("config") or []), *(word for word in given if "=" not in word)]
    overrides = [word for word in given if "=" in word]
    if (not recipes and not overrides) or words[0] in ("score", "config"):
        return
    paths = [find_recipe(recipe, words[0], code, folder) for recipe in recipes]
    try:
        config = load_config(paths or [folder / READERS], overrides)
        if words[0] in RL_COMMANDS or words[0] in ("sft", "dpo", "reward-train", "label-lines", "select-prompts", "evaluate"):
            check_config(config, command=words[0], world_size=config.parallel.num_ranks or 8)
    except ConfigError as error:
        wrong = [problem for problem in str(error).splitlines() if not USERS_OWN.search(problem)]
        assert not wrong, f"{code}: {' '.join(words)}: {wrong}"


def find_recipe(name: str, command: str, code: Code, folder: Path) -> Path:
    if name == READERS:
        return ROOT / STAND_INS.get(command, STAND_INS[""])
    for place in (folder, code.page.parent):
        if (place / name).is_file():
            return place / name
    pytest.fail(f"{code}: {name} is not in the repository; a recipe of the reader's is called {READERS}")


def check_python(words: list[str], code: Code, folder: Path) -> None:
    if words[:2] == ["-m", "megatron_rl.system.processes.torchrun"]:
        check_megatron_rl(words[words.index("megatron_rl.cli") + 1 :], code, folder)
        return
    if words[0] == "-c":
        ast.parse(words[1])
        return
    if words[:2] == ["-m", "pytest"]:
        return
    path = ROOT / (f"{words[1].replace('.', '/')}.py" if words[0] == "-m" else words[0])
    path = path if path.is_file() else folder / words[0]  # the page's own
    assert path.is_file(), f"{code}: {words[0]} does not exist"
    text = path.read_text()
    for word in words[1:]:
        if word.startswith("--"):
            assert f'"{word.split("=")[0]}"' in text, f"{code}: {path.name} has no {word}"


def check_script(words: list[str], code: Code, folder: Path) -> None:
    name, *arguments = words
    path = ROOT / name
    assert path.is_file(), f"{code}: {name} does not exist"
    subprocess.run(["/bin/bash", "-n", path], check=True)
    if any(name.startswith(one) for one in NOT_RUN) and name != "examples/models/submit.sh":
        flags = [word for word in arguments if word.startswith("--")]
        assert all(f"{flag})" in path.read_text() for flag in flags), f"{code}: {name} has not all of {flags}"
        return
    check_all(noted(folder, ["/bin/bash", name, *arguments], f"{folder / 'bin'}:/usr/bin:/bin"), code, folder)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_fence_names_its_language(page):
    text = page.read_text()
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(fences(page))
    bare = re.findall(rf"^ +(?:\.venv/bin/)?(?:{'|'.join(PROGRAMS)}) .*$", prose(page), re.MULTILINE)
    assert not bare, f"{page.name}: a command belongs into ```bash, not into an indented block: {bare}"
    for code in fences(page):
        assert code.language in LANGUAGES, f"{code}: write one of {', '.join(sorted(LANGUAGES))} after the ```"
        if code.language == "text":
            found = [line for line in code.text.splitlines() if re.match(rf"(\.venv/bin/)?({'|'.join(PROGRAMS)}) ", line)]
            assert not found, f"{code}: a command belongs into ```bash: {found}"


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_on_a_page_are_accepted_by_their_programs(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SGLANG_KEY", "key")
    for code in fences(page):
        if code.file and not (folder / code.file.partition("/")[0]).is_symlink():
            (folder / code.file).parent.mkdir(exist_ok=True)
            (folder / code.file).write_text(code.text)
        if code.language == "bash":
            calls = called(folder, code.text)
            assert calls or re.search("^(export|eval)", code.text), f"{code}: calls nothing"
            check_all(calls, code, folder)
    for code in spans(page):
        if re.match(rf"(\w+=(\S+|\".*?\") )*(\.venv/bin/)?({'|'.join(PROGRAMS)}) \S", code.text):
            check_all(called(folder, code.text), code, folder)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_json_python_and_yaml_on_a_page_parse(page, tmp_path):
    for code in fences(page):
        if code.language == "json":
            assert all(isinstance(json.loads(line), dict) for line in code.text.splitlines()), code
        elif code.language == "python":
            ast.parse(code.text)
        elif code.language == "yaml" and not code.text.startswith("decode:"):  # costs of a simulation, no recipe
            (tmp_path / "recipe.yaml").write_text(code.text)
            load_config(tmp_path / "recipe.yaml")


def test_unchecked_programs_still_appear_on_pages():
    text = "\n".join(page.read_text() for page in PAGES)
    assert [name for name in ELSEWHERE if name not in text] == []
    assert all((ROOT / name).exists() for name in NOT_RUN)


def test_mistakes_in_commands_are_found(folder, monkeypatch):
    monkeypatch.chdir(folder)
    page = ROOT / "docs" / "data.md"
    mistakes = {
        "megatron-rl trian --config recipe.yaml": "no command trian",
        "megatron-rl train --config recipe.yaml --dryrun": "--dryrun",
        "megatron-rl train --config nowhere.yaml": "nowhere.yaml",
        "megatron-rl train --config recipe.yaml batch.windo_tokens=1": "windo_tokens",
        "bash launch/nothing.sh": "does not exist",
        "bash launch/torchrun.sh train --config recipe.yaml run.nothing=1": "run.nothing",
        "bash launch/quickstart.sh run.nothing=1": "run.nothing",
        "bash examples/long_tail/compare.sh --minute 1": "--minute",
        "python tools/lock.py --chekc": "--chekc",
        "sbatch launch/slurm.sbatch train --config recipe.yaml run.nothing=1": "run.nothing",
        "frobnicate now": "frobnicate",
    }
    for line, says in mistakes.items():
        with pytest.raises((AssertionError, pytest.fail.Exception), match=re.escape(says)):
            check_all(called(folder, line), Code(page, 1, "bash", "", line), folder)
