"""Fenced blocks and inline code of every page."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"(?<!`)`((?:[^`\n]|\n(?!\n))+)`(?!`)")


@dataclass(frozen=True)
class Code:
    page: Path
    line: int
    language: str
    """Language of the fence; "span" for inline code."""
    file: str
    """File name after the language, or ""."""
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def fences(page: Path) -> list[Code]:
    """Blocks of a page in order, without the indentation of a list."""
    text, found = page.read_text(encoding="utf-8"), []
    for match in _FENCE.finditer(text):
        indent, (language, _, file) = match[1], match[2].partition(" ")
        body = re.sub(rf"^{indent}", "", match[3], flags=re.MULTILINE)
        found.append(Code(page, _line(text, match.start()), language, file, body))
    return found


def prose(page: Path) -> str:
    """A page with empty blocks; line numbers stay."""
    return _FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text(encoding="utf-8"))


def spans(page: Path) -> list[Code]:
    """Inline code, each on one line."""
    text = prose(page)
    return [Code(page, _line(text, match.start()), "span", "", " ".join(match[1].split())) for match in _SPAN.finditer(text)]


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1
