"""Rerun the planning command of each README in examples/models, and compare or write the recipes.

    python tools/plan_models.py [NAME ...]            # print the differences
    python tools/plan_models.py --write [NAME ...]    # write recipe.yaml, and the plan into README.md

Tests compare both files with the command's output.
"""

import argparse
import contextlib
import io
import os
import re
import shlex
import tempfile
from pathlib import Path

from megatron_rl.cli import main as megatron_rl

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "examples" / "models"
_COMMAND = re.compile(r"^megatron-rl (plan .*?)$", flags=re.MULTILINE)
_PLAN = re.compile(r"(<!-- tools/plan_models.py writes this -->\n```text\n).*?(```\n<!-- end -->)", flags=re.DOTALL)
_WIDTH = "110"


def names() -> list[str]:
    return sorted(folder.name for folder in MODELS.iterdir() if (folder / "README.md").is_file())


def command_of(readme: str) -> list[str]:
    """The words after megatron-rl of the command that a README shows; its lines are joined by backslashes."""
    found = _COMMAND.search(readme.replace("\\\n", ""))
    assert found, "a README of examples/models shows `megatron-rl plan ...`"
    return shlex.split(found[1])


def planned(name: str) -> tuple[str, str]:
    """(recipe.yaml, README.md) as the command of the README gives them."""
    readme = (MODELS / name / "README.md").read_text()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(ROOT):
        words = command_of(readme)
        place = words.index("--write") + 1
        named, words[place] = words[place], f"{folder}/recipe.yaml"
        text = io.StringIO()
        width = os.environ.get("COLUMNS")
        os.environ["COLUMNS"] = _WIDTH
        try:
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
                assert megatron_rl(words) == 0, name
        finally:
            os.environ.pop("COLUMNS")
            os.environ |= {"COLUMNS": width} if width else {}
        recipe = Path(words[place]).read_text().replace(words[place], named)
        plan = "\n".join(line.rstrip() for line in text.getvalue().replace(words[place], named).splitlines()) + "\n"
        return recipe, _PLAN.sub(lambda found: found[1] + plan + found[2], readme)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write recipe.yaml and README.md")
    parser.add_argument("names", nargs="*", help="folders of examples/models; default: all")
    arguments = parser.parse_args()
    for name in arguments.names or names():
        recipe, readme = planned(name)
        for file, text in ((MODELS / name / "recipe.yaml", recipe), (MODELS / name / "README.md", readme)):
            differs = not file.is_file() or file.read_text() != text
            print(f"{file.relative_to(ROOT)}: {'differs' if differs else 'as planned'}")
            if arguments.write and differs:
                file.write_text(text)


if __name__ == "__main__":
    main()
