"""The lines of a program inside a response, and the token that ends each of them. Pure.

Invariants:

- Characters belong to the token that completes them, so a line ends at exactly one token, also where a token holds a
  newline in its middle, several line ends, or a part of a character only.
- Lines exist inside the code region alone; a response without code has none.
- Blank lines and comments are neutral: they are never labelled, rewarded or counted.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, without special tokens."""
Region = tuple[int, int]
"""[start, end) in characters."""

COMMENT_PREFIXES = ("#",)
MAX_PARTIAL_TOKENS = 8
"""A character has at most 4 bytes: tokens beyond this that still end in half a character are broken text."""
REPLACEMENT = "\ufffd"
"""What decoders put where bytes do not (yet) make a character."""

_FENCE = re.compile(r"^[ ]{0,3}```[^`\n]*$", re.MULTILINE)
_THOUGHT_END = "</think>"


@dataclass(frozen=True)
class CodeLine:
    text: str
    """Without its line end."""
    end: int
    """The first character of the response after the line and its newline."""
    neutral: bool
    """Blank, or a comment."""


def code_region(text: str) -> Region | None:
    """Where the program stands: the last fenced block after the thought, else everything after the thought.

    A block that is still open reaches to the end. None if there is nothing but white space.
    """
    start = text.rfind(_THOUGHT_END)
    start = 0 if start < 0 else start + len(_THOUGHT_END)
    region = (start, len(text))
    opening = None
    for fence in _FENCE.finditer(text, start):
        if opening is None:
            opening = min(fence.end() + 1, len(text))
        else:
            region, opening = (opening, fence.start()), None
    if opening is not None:
        region = (opening, len(text))
    return region if text[slice(*region)].strip() else None


def code_lines(
    text: str, region: Region | None = None, comment_prefixes: Sequence[str] = COMMENT_PREFIXES
) -> list[CodeLine]:
    """The lines of ``region`` (None: of the code region) in order; without a region there are none."""
    region = code_region(text) if region is None else region
    if region is None:
        return []
    lines, position, stop = [], region[0], region[1]
    while position < stop:
        newline = text.find("\n", position, stop)
        end = stop if newline < 0 else newline + 1
        line = text[position:end].rstrip("\r\n")
        lines.append(CodeLine(line, end, is_neutral(line, comment_prefixes)))
        position = end
    return lines


def is_neutral(line: str, comment_prefixes: Sequence[str] = COMMENT_PREFIXES) -> bool:
    stripped = line.strip()
    return not stripped or stripped.startswith(tuple(comment_prefixes))


def line_end_tokens(
    token_ids: Sequence[int], decode: Decode, region_of: Callable[[str], Region | None] = code_region
) -> list[int]:
    """Per line of the code region the index of the token that ends it; lines that share a token repeat its index."""
    pieces = token_texts(token_ids, decode)
    text = "".join(pieces)
    region = region_of(text)
    return end_tokens(code_lines(text, region) if region else [], pieces)


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
    if REPLACEMENT not in "".join(pieces) and "".join(pieces) == decode(token_ids):
        return pieces
    return _texts_in_context(token_ids, decode)


def _texts_in_context(token_ids: Sequence[int], decode: Decode) -> list[str]:
    pieces: list[str] = []
    context = done = 0  # tokens [context, done) are written already and only stand before the next ones
    written = ""  # what they decode to, and what of the next ones is written
    for position in range(1, len(token_ids) + 1):
        text = decode(token_ids[context:position])
        stable = text.rstrip(REPLACEMENT)
        is_whole = stable == text or position - done > MAX_PARTIAL_TOKENS or position == len(token_ids)
        known = text if is_whole else stable
        pieces.append(known[len(written) :])
        if len(known) > len(written):
            written = known
        if is_whole:
            context, done = done, position
            written = decode(token_ids[context:done])
    return pieces
