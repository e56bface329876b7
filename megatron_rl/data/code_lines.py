"""Lines of a program inside a response, and the token that ends each line. Pure.

Invariants:

- Characters belong to the token that completes them, so a line ends at exactly one token, even if a token has a newline
  in its middle, several line ends, or only a part of a character.
- Lines exist only inside the code region; a response without code has none.
- Blank lines and comments are neutral: they are never labeled, rewarded or counted.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, without special tokens."""
Region = tuple[int, int]
"""[start, end) in characters."""

COMMENT_PREFIX = "#"
"""Only Python programs are found (``_PYTHON_TAG``)."""
ENTRY_POINT_FIELD = "entry_point"
"""Row field with the name of the function under test, as the code reward reads it."""
_MAX_PARTIAL_TOKENS = 8
"""Maximum number of tokens of one character, which has at most 4 bytes; a longer partial character is broken text."""
_REPLACEMENT = "\ufffd"
"""Character that decoders emit for bytes that do not (yet) form a character."""

_FENCE = re.compile(r"(?P<marks>`{3,}|~{3,})[ \t]*\{?[ \t]*\.?(?P<tag>[^\s`{},:]*)[^`]*")
_PYTHON_TAG = re.compile(r"i?py(?:thon)?[0-9.]*", re.IGNORECASE)
_QUOTES = re.compile(r'"{3}|\'{3}')
_MAX_FENCE_INDENT = 3
"""Largest indentation of a closing fence beyond the opening one (CommonMark)."""
_THOUGHT_END = "</think>"


@dataclass(frozen=True)
class CodeLine:
    text: str
    """Text without its line end."""
    end: int
    """Index of the response's first character after the line and its newline."""
    neutral: bool
    """True if the line is blank or a comment."""


def code_region(text: str, entry_point: str = "") -> Region | None:
    """Region of a response's program; None if there is only whitespace.

    The program is the last fenced block after the thought that defines ``entry_point``, else the last block marked
    as Python, else the last block, else all text after the thought. An unclosed block extends to the end.
    """
    region, _ = _program(text, entry_point)
    return region if text[slice(*region)].strip() else None


def extract_code(text: str, entry_point: str = "") -> str:
    """Text of the program that ``code_region`` finds, dedented by the indentation of the block's fence; blank if there is no program."""
    return _dedented(text, *_program(text, entry_point))


def fenced_blocks(text: str) -> list[str]:
    """Fenced blocks after the thought: blocks marked as Python, or all blocks if none is marked."""
    return [_dedented(text, *block) for block in _marked(text)]


def _dedented(text: str, region: Region, indent: int) -> str:
    lines = text[slice(*region)].splitlines(keepends=True)
    # Blanks alone are indentation: a line shorter than it keeps its line end.
    return "".join(line if line[:indent].strip(" \t") else line[indent:] for line in lines)


def _after_thought(text: str) -> int:
    return text.rfind(_THOUGHT_END) + len(_THOUGHT_END) if _THOUGHT_END in text else int(text.startswith("\ufeff"))


def _marked(text: str) -> list[tuple[Region, int]]:
    """(region, indentation of the opening fence) of each block marked as Python, or of all blocks if none is marked."""
    blocks = list(_blocks(text, _after_thought(text)))
    chosen = [block for block in blocks if _PYTHON_TAG.fullmatch(block[0])] or blocks
    return [(region, indent) for _, region, indent in chosen]


def _program(text: str, entry_point: str) -> tuple[Region, int]:
    """(region, indentation) of the program."""
    marked = _marked(text)
    if entry_point:
        heads = (f"def {entry_point}(", f"def {entry_point} (", f"class {entry_point}", f"{entry_point} =")
        marked = [block for block in marked if any(head in text[slice(*block[0])] for head in heads)] or marked
    return marked[-1] if marked else ((_after_thought(text), len(text)), 0)


def _blocks(text: str, position: int) -> Iterator[tuple[str, Region, int]]:
    """(language tag, region, indentation of the opening fence) of each fenced block from ``position`` on."""
    lines = text[position:].splitlines(keepends=True)
    ends = [position + total for total in accumulate(map(len, lines))]
    number = 0
    while number < len(lines):
        fence = _FENCE.fullmatch(lines[number].strip())
        number += 1
        if fence is None:
            continue
        indent = len(lines[number - 1]) - len(lines[number - 1].lstrip())
        closing = _closing(lines, number, fence["marks"], indent)
        start, end = ends[number - 1], ends[closing - 1]
        if closing < len(lines) or start < end:
            yield fence["tag"], (start, end), indent
        number = closing + 1


def _closing(lines: Sequence[str], start: int, marks: str, indent: int) -> int:
    """Index of the line that closes a block: not inside a docstring, if there is a choice; the end if none does."""
    num_quotes, first = 0, len(lines)
    for number in range(start, len(lines)):
        stripped = lines[number].strip()
        if stripped.startswith(marks) and not stripped.strip(marks[0]):
            if num_quotes % 2 == 0 and len(lines[number]) - len(lines[number].lstrip()) <= indent + _MAX_FENCE_INDENT:
                return number
            first = min(first, number)
        num_quotes += len(_QUOTES.findall(stripped))
    return first


def code_lines(text: str, *, entry_point: str = "") -> list[CodeLine]:
    """Lines of the code region in order; empty without a region."""
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
    """Index, per line, of the piece with its last character; ``pieces`` concatenate to the text of the lines."""
    ends, total = [], 0
    for piece in pieces:
        total += len(piece)
        ends.append(total)
    return [bisect_right(ends, line.end - 1) for line in lines]


def token_texts(token_ids: Sequence[int], decode: Decode) -> list[str]:
    """Characters that each token completes; concatenated they are the text.

    Usually this is the text of each token decoded alone. If that fails (a character of several tokens, or a decoder
    that depends on preceding tokens), tokens are decoded in their context.
    """
    single = {token: decode([token]) for token in set(token_ids)}
    pieces = [single[token] for token in token_ids]
    if _REPLACEMENT not in "".join(pieces) and "".join(pieces) == decode(token_ids):
        return pieces
    return _texts_in_context(token_ids, decode)


def _texts_in_context(token_ids: Sequence[int], decode: Decode) -> list[str]:
    pieces: list[str] = []
    context = done = 0  # tokens [context, done) are already written and only serve as context
    written = ""  # decoded text of the context tokens, plus the written text of later tokens
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
