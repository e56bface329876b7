"""The lines of a program inside a response, and the token that ends each of them. Pure.

Invariants:

- Characters belong to the token that completes them, so a line ends at exactly one token, also where a token holds a
  newline in its middle, several line ends, or a part of a character only.
- Lines exist inside the code region alone; a response without code has none.
- Blank lines and comments are neutral: they are never labelled, rewarded or counted.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, without special tokens."""
Region = tuple[int, int]
"""[start, end) in characters."""

COMMENT_PREFIX = "#"
"""Only Python programs are found (``_PYTHON_TAGS``)."""
ENTRY_POINT_FIELD = "entry_point"
"""The row field that names the function under test, as the code reward reads it."""
_MAX_PARTIAL_TOKENS = 8
"""A character has at most 4 bytes: tokens beyond this that still end in half a character are broken text."""
_REPLACEMENT = "\ufffd"
"""What decoders put where bytes do not (yet) make a character."""

_FENCE = "```"
_PYTHON_TAGS = ("python", "py", "python3", "py3")
_THOUGHT_END = "</think>"


@dataclass(frozen=True)
class CodeLine:
    text: str
    """Without its line end."""
    end: int
    """The first character of the response after the line and its newline."""
    neutral: bool
    """Blank, or a comment."""


def code_region(text: str, entry_point: str = "") -> Region | None:
    """Where the program of a response stands; None if there is nothing but white space.

    That is the last fenced block after the thought which defines ``entry_point``, else the last one marked as Python,
    else the last one, else everything after the thought; a block that is still open reaches to the end.
    """
    region, _ = _program(text, entry_point)
    return region if text[slice(*region)].strip() else None


def extract_code(text: str, entry_point: str = "") -> str:
    """The program in ``code_region``, its lines without the indentation of the block's fence."""
    return _dedented(text, *_program(text, entry_point))


def fenced_blocks(text: str) -> list[str]:
    """The fenced blocks after the thought: those marked as Python, or all if none is."""
    return [_dedented(text, block.region, block.indent) for block in _marked(text)]


def _dedented(text: str, region: Region, indent: int) -> str:
    lines = text[slice(*region)].splitlines(keepends=True)
    return "".join(line[indent:] if line[:indent].isspace() else line for line in lines)


def _after_thought(text: str) -> int:
    return text.rfind(_THOUGHT_END) + len(_THOUGHT_END) if _THOUGHT_END in text else 0


def _marked(text: str) -> "list[_Block]":
    blocks = list(_blocks(text, _after_thought(text)))
    return [block for block in blocks if block.tag in _PYTHON_TAGS] or blocks


def _program(text: str, entry_point: str) -> tuple[Region, int]:
    """Region and indentation of the program."""
    marked = _marked(text)
    if entry_point:
        heads = (f"def {entry_point}(", f"def {entry_point} (", f"class {entry_point}", f"{entry_point} =")
        marked = [b for b in marked if any(head in text[slice(*b.region)] for head in heads)] or marked
    return (marked[-1].region, marked[-1].indent) if marked else ((_after_thought(text), len(text)), 0)


class _Block(NamedTuple):
    tag: str
    """Language."""
    region: Region
    indent: int
    """Characters before the opening fence."""


def _blocks(text: str, position: int) -> Iterator[_Block]:
    """The fenced blocks from ``position`` on."""
    tag: str | None = None
    start, indent = position, 0
    for line in text[position:].splitlines(keepends=True):
        end, stripped = position + len(line), line.strip()
        if tag is None:
            if stripped.startswith(_FENCE):
                tag, start, indent = stripped.strip("`").strip().lower(), end, len(line) - len(line.lstrip())
        elif stripped == _FENCE:
            yield _Block(tag, (start, position), indent)
            tag = None
        position = end
    if tag is not None and start < position:
        yield _Block(tag, (start, position), indent)


def code_lines(text: str, *, entry_point: str = "") -> list[CodeLine]:
    """The lines of the code region in order; without a region there are none."""
    region = code_region(text, entry_point)
    return lines_between(text, region) if region else []


def lines_between(text: str, region: Region) -> list[CodeLine]:
    lines, position, stop = [], region[0], region[1]
    while position < stop:
        newline = text.find("\n", position, stop)
        end = stop if newline < 0 else newline + 1
        line = text[position:end].rstrip("\r\n")
        lines.append(CodeLine(line, end, is_neutral(line)))
        position = end
    return lines


def is_neutral(line: str) -> bool:
    stripped = line.strip()
    return not stripped or stripped.startswith(COMMENT_PREFIX)


def end_tokens(lines: Sequence[CodeLine], pieces: Sequence[str]) -> list[int]:
    """Per line the index of the piece that holds its last character; ``pieces`` make up the text of the lines."""
    ends, total = [], 0
    for piece in pieces:
        total += len(piece)
        ends.append(total)
    return [bisect_right(ends, line.end - 1) for line in lines]


def token_texts(token_ids: Sequence[int], decode: Decode) -> list[str]:
    """Per token the characters that it completes; end to end they are the text.

    Most texts are the texts of their tokens one by one. Where that fails (a character made of several tokens, a
    decoder that looks at what stands before), tokens are decoded in their context.
    """
    single = {token: decode([token]) for token in set(token_ids)}
    pieces = [single[token] for token in token_ids]
    if _REPLACEMENT not in "".join(pieces) and "".join(pieces) == decode(token_ids):
        return pieces
    return _texts_in_context(token_ids, decode)


def _texts_in_context(token_ids: Sequence[int], decode: Decode) -> list[str]:
    pieces: list[str] = []
    context = done = 0  # tokens [context, done) are written already and only stand before the next ones
    written = ""  # what they decode to, and what of the next ones is written
    for position in range(1, len(token_ids) + 1):
        text = decode(token_ids[context:position])
        stable = text.rstrip(_REPLACEMENT)
        is_whole = stable == text or position - done > _MAX_PARTIAL_TOKENS or position == len(token_ids)
        known = text if is_whole else stable
        pieces.append(known[len(written) :])
        if len(known) > len(written):
            written = known
        if is_whole:
            context, done = done, position
            written = decode(token_ids[context:done])
    return pieces
