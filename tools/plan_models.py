"""Rerun the planning commands of each README in examples/models, and compare or write the recipes.

    python tools/plan_models.py [NAME ...]            # print the differences
    python tools/plan_models.py --write [NAME ...]    # write the recipes, and the plans into README.md

The first command of a README is shown with its whole plan, the others with their costs. Tests compare all files with the commands'
output.
"""

import argparse
import contextlib
import io
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.cli import main as megatron_rl

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "examples" / "models"
_COMMAND = re.compile(r"^megatron-rl (plan .*?)$", flags=re.MULTILINE)
_PLAN = re.compile(r"(<!-- tools/plan_models.py writes this -->\n```text\n).*?(```\n<!-- end -->)", flags=re.DOTALL)
_COST = re.compile(r"^(?:step|bottleneck|cost|memory|to start|[\d,]+ steps)\b.*$|^parallel\..*$", flags=re.MULTILINE)
_WIDTH = "110"


def names() -> list[str]:
    return sorted(folder.name for folder in MODELS.iterdir() if (folder / "README.md").is_file())


def recipes(name: str) -> list[str]:
    """Names of the recipes that the README's commands write."""
    return [Path(words[words.index("--write") + 1]).name for words in commands_of((MODELS / name / "README.md").read_text())]


def commands_of(readme: str) -> list[list[str]]:
    """The words after megatron-rl of the commands that a README shows; a command's lines are joined by backslashes."""
    return [shlex.split(found[1]) for found in _COMMAND.finditer(readme.replace("\\\n", ""))]


def planned(name: str) -> dict[str, str]:
    """Files of a folder, recipes and README.md, as the commands of the README give them."""
    readme = (MODELS / name / "README.md").read_text()
    files, texts = {}, []
    for words in commands_of(readme):
        file, recipe, text = _plan(words)
        files[file], texts = recipe, [*texts, text if not texts else "".join(f"{line}\n" for line in _COST.findall(text))]
    remaining: Iterator[str] = iter(texts)
    return {**files, "README.md": _PLAN.sub(lambda found: found[1] + next(remaining) + found[2], readme)}


def _plan(words: list[str]) -> tuple[str, str, str]:
    """(name of the recipe, the recipe, what the command prints)."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(ROOT):
        place = words.index("--write") + 1
        named, words[place] = words[place], f"{folder}/recipe.yaml"
        text = io.StringIO()
        width = os.environ.get("COLUMNS")
        os.environ["COLUMNS"] = _WIDTH
        try:
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
                assert megatron_rl(words) == 0, named
        finally:
            os.environ.pop("COLUMNS")
            os.environ |= {"COLUMNS": width} if width else {}
        recipe = Path(words[place]).read_text().replace(words[place], named)
        shown = text.getvalue().replace(words[place], named).splitlines()
        return Path(named).name, recipe, "".join(f"{line.rstrip()}\n" for line in shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the recipes and README.md")
    parser.add_argument("names", nargs="*", help="folders of examples/models; default: all")
    arguments = parser.parse_args()
    for name in arguments.names or names():
        for file, text in planned(name).items():
            path = MODELS / name / file
            differs = not path.is_file() or path.read_text() != text
            print(f"{path.relative_to(ROOT)}: {'differs' if differs else 'as planned'}", flush=True)
            if arguments.write and differs:
                path.write_text(text)


if __name__ == "__main__":
    main()
