"""The command line as a whole: what it prints without a command's work, what it imports for that, and what it completes."""

import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_rl
from megatron_rl.cli import _parse, _parsers, main, missing_package
from megatron_rl.commands import COMMANDS, EXAMPLES

ROOT = Path(__file__).parents[3]
HEAVY = {"torch", "megatron", "sglang", "transformers", "numpy", "rich", "omegaconf", "matplotlib", "pyarrow", "aiohttp"}
HELP_CPU_S = 0.3


def helped(capsys, *words) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_has_a_text_and_every_help_an_example_and_the_exit_statuses(name, capsys):
    text = helped(capsys, name)
    assert f"example: {EXAMPLES[name]}\n" in text and "75 stopped by a signal and resumable" in text
    _, command = _parsers(name)
    assert [action.dest for action in command._actions if not action.help] == []


def test_the_help_names_every_command(capsys):
    text = helped(capsys)
    assert EXAMPLES.keys() == COMMANDS.keys() and all(f"\n    {name}" in text for name in COMMANDS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_a_command_that_is_accepted(name):
    program, *words = shlex.split(EXAMPLES[name])
    assert program == "megatron-rl" and words[0] == name
    assert _parse(words).run


def test_the_version_names_the_engines_without_importing_them(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0 and lines[0] == f"megatron-rl {megatron_rl.__version__}"
    assert [line.split()[0] for line in lines] == ["megatron-rl", "python", "torch", "megatron-core", "sglang"]
    assert not any("not installed" in line for line in lines)


@pytest.mark.parametrize("words", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_imports_no_library(words):
    code = "import sys; from megatron_rl.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    imported = {name.partition(".")[0] for name in done.stderr.split()}
    assert imported & HEAVY == set()


@pytest.mark.parametrize("words", [["--help"], ["--version"]], ids=" ".join)
def test_help_and_version_are_quick(words):
    def cpu_s() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "megatron_rl", *words]
        subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(cpu_s() for _ in range(3)) < HELP_CPU_S


@pytest.mark.parametrize(("name", "remedy"), [("trian", "did you mean train?"), ("score-file", "did you mean score?"), ("x", "lists")])
def test_a_mistyped_command_is_answered_with_the_nearest(name, remedy, capsys):
    assert main([name, "--config", "recipe.yaml"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {name!r} is not a command; ") and remedy in said and len(said.splitlines()) == 1


def completions(line: str) -> list[str]:
    """What the shell offers after ``line``, asked as argcomplete's shell function asks."""
    environment = os.environ | {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": "/dev/stdout", "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_WORDBREAKS": " ",
    }  # fmt: skip
    command = [sys.executable, "-m", "megatron_rl.cli"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def test_the_shell_completes_commands_options_and_keys():
    assert completions("megatron-rl sel") == ["select-prompts"]
    assert completions("megatron-rl train --gpus") == ["--gpus-per-node"]
    assert {"batch.window_tokens=", "batch.window_jitter_tokens="} == set(completions("megatron-rl train --config a.yaml batch.window_"))


def test_a_missing_package_is_named_with_its_extra_in_one_line():
    said = missing_package(ModuleNotFoundError("No module named 'sglang.srt'", name="sglang.srt"))
    assert "sglang" in said and "megatron_rl[cpu]" in said and "megatron_rl[gpu]" in said and "\n" not in said
    assert missing_package(ModuleNotFoundError("x", name="megatron_rl.nothing")) == ""
    assert missing_package(ModuleNotFoundError("x", name="sqlite3.nothing")) == ""


def test_examples_are_written_with_a_link_to_the_environment(tmp_path, capsys):
    folder = tmp_path / "here"
    assert main(["examples", str(folder)]) == 0 and str(folder) in capsys.readouterr().out
    for path in ("launch/torchrun.sh", "examples/gpu/tppo.yaml", "requirements/cpu.txt", "tools/prepare_data.py"):
        assert (folder / path).read_text() == (ROOT / path).read_text()
    assert os.readlink(folder / ".venv") == sys.prefix
    assert main(["examples", str(folder)]) == 2
    assert "not an empty folder" in capsys.readouterr().err


