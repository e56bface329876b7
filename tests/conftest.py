"""Settings of all tests. Time is measured in benchmarks only: a slow example on a busy machine is not a failure.

A run ends with the tests that this machine could not run: the reason, their number, and the claims of their files,
which are therefore not proved here.
"""

import ast
import gc
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("megatron_rl", deadline=None)
# Many more broken inputs, other ones in each run: see tests/fuzz.py.
settings.register_profile("fuzz", deadline=None)
settings.load_profile("megatron_rl")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is imported: collections would scan that again and again
    if getattr(config.option, "dist", "no") == "no":  # not in the process that only hands out tests
        from megatron_rl.models.hf.model_config import register_aliases

        register_aliases()  # tests build configurations of every family through transformers


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = not_proved(terminalreporter.stats.get("skipped", []), config.rootpath)
    if "not gpu" in config.option.markexpr:
        lines.append("tests marked gpu: not selected, they need a GPU (bash launch/test.sh -m gpu)")
    if lines:
        terminalreporter.section("skipped, and therefore not proved on this machine")
        terminalreporter.write("".join(f"{line}\n" for line in lines))


def not_proved(skipped: list[pytest.TestReport], root: Path) -> list[str]:
    """Reasons of skipped tests with their number, each followed by the files' claims with their own number."""
    files: dict[str, Counter[str]] = defaultdict(Counter)
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        files[" ".join(reason.removeprefix("Skipped: ").split())][report.nodeid.partition("::")[0]] += 1
    lines = []
    for reason, counts in sorted(files.items(), key=lambda item: -item[1].total()):
        lines.append(f"{counts.total()} skipped: {reason}")
        lines += [f"    {number} of {name}: {claim(root / name)}" for name, number in sorted(counts.items())]
    return lines


def claim(path: Path) -> str:
    """The first line of a test file's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) if path.is_file() else None
    return (docstring or "no claim").partition("\n")[0]
