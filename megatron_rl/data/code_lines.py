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

_MARGIN = " \t>\u200b"
"""Characters before a fence that is indented, or in a quote."""
_FENCE = re.compile(
    rf"(?P<margin>[\s{_MARGIN}]*(?:(?:[-*+]|[0-9]+[.)])[ \t]+)?)(?P<marks>`{{3,}}|~{{3,}})[ \t]*\{{?[ \t]*\.?(?P<tag>[^\s`{{}},:]*)[^`]*"
)
_FENCE_AFTER_PROSE = re.compile(rf"(?P<margin>[{_MARGIN}]*)[^`]+(?P<marks>`{{3,}})(?P<tag>(?:i?py(?:thon)?[0-9.]*)?)", re.IGNORECASE)
_WRAPPERS = ("markdown", "md")
"""Tags of blocks that hold further fences."""
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
    """Text of the program that ``code_region`` finds, without the indentation and quote marks of the block's fence; blank if there is
    no program."""
    return _dedented(text, *_program(text, entry_point))


def fenced_blocks(text: str) -> list[str]:
    """Fenced blocks after the thought: blocks marked as Python, or all blocks if none is marked."""
    return [_dedented(text, *block) for block in _marked(text)]


def _dedented(text: str, region: Region, margin: int) -> str:
    # A line with less margin keeps its line end and its code.
    return re.sub(rf"^[{_MARGIN}]{{0,{margin}}}", "", text[slice(*region)], flags=re.MULTILINE)


def _after_thought(text: str) -> int:
    return text.rfind(_THOUGHT_END) + len(_THOUGHT_END) if _THOUGHT_END in text else int(text.startswith("\ufeff"))


def _marked(text: str) -> list[tuple[Region, int]]:
    """(region, margin before the opening fence) of each block marked as Python, or of all blocks if none is marked."""
    blocks = list(_blocks(text, _after_thought(text)))
    chosen = [block for block in blocks if _PYTHON_TAG.fullmatch(block[0])] or blocks
    return [(region, margin) for _, region, margin in chosen]


def _program(text: str, entry_point: str) -> tuple[Region, int]:
    """(region, margin) of the program."""
    marked = _marked(text)
    if entry_point:
        heads = (f"def {entry_point}(", f"def {entry_point} (", f"class {entry_point}", f"{entry_point} =")
        marked = [block for block in marked if any(head in text[slice(*block[0])] for head in heads)] or marked
    return marked[-1] if marked else ((_after_thought(text), len(text)), 0)


def _blocks(text: str, position: int) -> Iterator[tuple[str, Region, int]]:
    """(language tag, region, margin before the opening fence) of each fenced block from ``position`` on."""
    lines = text[position:].splitlines(keepends=True)
    ends = [position + total for total in accumulate(map(len, lines))]
    number = 0
    while number < len(lines):
        fence = _FENCE.fullmatch(lines[number].rstrip()) or _FENCE_AFTER_PROSE.fullmatch(lines[number].rstrip())
        number += 1
        if fence is None or fence["tag"].lower() in _WRAPPERS:
            continue
        margin, start = fence.end("margin"), ends[number - 1]
        closing = _closing(lines, number, fence["marks"], margin)
        end = ends[closing - 1]
        if closing < len(lines):  # code may precede the marks
            code = lines[closing].partition(fence["marks"])[0]
            end += len(code) if code.strip(_MARGIN) else 0
        if closing < len(lines) or start < end:
            yield fence["tag"], (start, end), margin
        number = closing + 1


def _closing(lines: Sequence[str], start: int, marks: str, margin: int) -> int:
    """Index of the line that closes a block: not inside a docstring, if there is a choice; the end if none does."""
    num_quotes, first, mixed = 0, len(lines), len(lines)
    for number in range(start, len(lines)):
        code = lines[number].lstrip(_MARGIN)
        stripped = code.rstrip()
        if stripped.startswith(marks) and not stripped.strip(marks[0]):
            if num_quotes % 2 == 0 and len(lines[number]) - len(code) <= margin + _MAX_FENCE_INDENT:
                return number
            first = min(first, number)
        elif num_quotes % 2 == 0 and (stripped.startswith(marks) or stripped.endswith(marks)):  # next to other text
            mixed = min(mixed, number)
        num_quotes += len(_QUOTES.findall(stripped))
    return first if first < len(lines) else mixed


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
    stripped = line.lstrip(_MARGIN).rstrip()
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
