"""Laws of megatron_rl/data/code_lines.py: the program's region in a response, and the ends of its lines."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.code_lines import (
    code_lines,
    code_region,
    end_tokens,
    extract_code,
    is_neutral,
    lines_between,
    token_texts,
)


class ByteTokens:
    """A byte-level tokenizer whose tokens are arbitrary byte strings; decoding replaces invalid UTF-8."""

    def __init__(self, pieces):
        self.pieces = list(pieces)

    @property
    def ids(self):
        return list(range(len(self.pieces)))

    def decode(self, ids):
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


def line_ends(ids, decode):
    pieces = token_texts(ids, decode)
    return end_tokens(code_lines("".join(pieces)), pieces)


def cut(data: bytes, borders) -> ByteTokens:
    places = sorted({0, len(data), *(b % (len(data) + 1) for b in borders)})
    return ByteTokens([data[a:b] for a, b in itertools.pairwise(places)])


@pytest.mark.parametrize(
    ("line", "neutral"), [("", True), (" \t", True), ("  # x", True), ("x # y", False), ("x", False), ("'#'", False)]
)
def test_neutral_lines_are_blank_or_comments(line, neutral):
    assert is_neutral(line) is neutral


# ------------------------------------------------------------------------------------------------------------- region


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("a = 1\nb = 2", "a = 1\nb = 2"),
        ("Here:\n```python\na = 1\n```\nDone.", "a = 1\n"),
        ("```\nold\n```\ntext\n```py\nnew\n```", "new\n"),
        ("Cut:\n```python\na = 1\nb =", "a = 1\nb ="),
        ("<think>\n```python\nno\n```\n</think>\n```python\nyes\n```", "yes\n"),
        ("<think>x</think>a = 1", "a = 1"),
        ("inline ```code``` only", "inline ```code``` only"),
        ("Open:\n```python", "Open:\n```python"),
        ("```python\na = 1\n```\n```text\nout\n```", "a = 1\n"),
    ],
)
def test_code_region_is_the_last_block_after_the_thought_or_all_of_it(text, program):
    assert text[slice(*code_region(text))] == program


@pytest.mark.parametrize("text", ["", " \n", "<think>a = 1</think>", "```python\n```"])
def test_text_without_a_program_has_no_lines(text):
    assert code_region(text) is None
    assert code_lines(text) == []


pieces_of_responses = st.sampled_from(
    ["```", "```python", "```py\n", "\n", "x = 1", "def f():", "    return 2", "</think>", "<think>", " ", "``", "text"]
)


@given(st.lists(pieces_of_responses, max_size=14), st.sampled_from(["", "f"]))
def test_code_region_is_the_code_that_the_code_reward_runs(pieces, entry_point):
    text = "".join(pieces)
    region = code_region(text, entry_point)
    found = text[slice(*region)] if region else ""
    run = extract_code(text, entry_point)
    # The reward also takes the fence's indentation off the lines.
    assert [line.strip() for line in found.split("\n")] == [line.strip() for line in run.split("\n")] or not (
        found.strip() or run.strip()
    )


def test_indented_fences_leave_blank_lines_whole():
    assert extract_code("  ```py\n  a = 1\n\n  b = 2\n  ```") == "a = 1\n\nb = 2\n"


def test_quote_marks_before_a_fence_are_taken_off_its_lines():
    quoted = "> Here:\n>\n> ```py\n> def f(a):\n>\n>     return a > 1\n> ```\n> Done."
    assert extract_code(quoted) == "def f(a):\n\n    return a > 1\n"
    assert extract_code("> > ```py\n> > a = 1\n>> b = 2\n> > ```") == "a = 1\nb = 2\n"
    assert [line.neutral for line in code_lines(quoted)] == [False, True, False]


CODE = "def f(a):\n\n    return a"


@pytest.mark.parametrize(
    "text",
    [
        f"Here: ```python\n{CODE}\n```",
        f"Code:```\n{CODE}\n```\nDone.",
        f"- ```python\n{CODE}\n```".replace("\n", "\n  "),
        f"1. ```python\n{CODE}\n```".replace("\n", "\n   "),
        f"```python\n{CODE}```\nThis returns a.",
        f"```python\n{CODE}\n``` returns a.",
        f"```markdown\n# Solution\n```python\n{CODE}\n```\nIt returns a.\n```",
    ],
)
def test_fences_next_to_other_text_are_read(text):
    assert extract_code(text).strip() == CODE


@pytest.mark.parametrize("text", ["a = 1  # ~~~", "Fine~~~\na = 1", "a = '```x```'"])
def test_marks_in_prose_or_code_are_no_fences(text):
    assert extract_code(text) == text


def test_code_region_prefers_the_block_that_defines_the_entry_point():
    text = "```python\ndef f(): return 1\n```\n```python\nprint(f())\n```"
    assert text[slice(*code_region(text))] == "print(f())\n"
    assert text[slice(*code_region(text, "f"))] == "def f(): return 1\n"


# ------------------------------------------------------------------------------------------------------------- tokens


@given(
    st.text(alphabet="a \n#é好🙂`", max_size=30),
    st.lists(st.integers(0, 200), max_size=30),
)
def test_line_ends_at_the_token_that_completes_its_last_character(text, borders):
    data = text.encode()
    tokens = cut(data, borders)
    lines = lines_between(text, (0, len(text)))
    found = end_tokens(lines, token_texts(tokens.ids, tokens.decode))
    borders_of = [sum(map(len, tokens.pieces[: i + 1])) for i in tokens.ids]
    expected = []
    for line in lines:
        last_byte = len(text[: line.end].encode())  # the byte count up to and including the line's last character
        expected.append(next(i for i, border in enumerate(borders_of) if border >= last_byte))
    assert found == expected
    assert len(found) == len(lines) and found == sorted(found)


@given(st.binary(max_size=24), st.lists(st.integers(0, 200), max_size=24))
def test_token_texts_concatenate_to_the_text_for_any_bytes(data, borders):
    tokens = cut(data, borders)
    pieces = token_texts(tokens.ids, tokens.decode)
    assert len(pieces) == len(tokens.ids)
    assert "".join(pieces).count("\n") == data.count(b"\n")
    if data.decode(errors="ignore").encode() == data:
        assert "".join(pieces) == data.decode()


def test_one_token_may_end_several_lines_and_start_the_next():
    tokens = ByteTokens([b"def f():\n    ", b"x = 1\n\n    y", b" = 2", b"\n", b"z"])
    assert line_ends(tokens.ids, tokens.decode) == [0, 1, 1, 3, 4]


def test_a_decoder_that_drops_the_leading_space_is_decoded_in_context():
    words = [" a", " =", " 1", "\n", " b"]

    def decode(ids):
        return "".join(words[i] for i in ids).removeprefix(" ")

    assert token_texts(range(5), decode) == ["a", " =", " 1", "\n", " b"]
    assert line_ends(range(5), decode) == [3, 4]


def test_special_tokens_end_no_line():
    words = ["a\n", "b", ""]
    assert line_ends([0, 1, 2], lambda ids: "".join(words[i] for i in ids)) == [0, 1]


def test_lines_outside_the_program_have_no_end_token():
    tokens = ByteTokens([b"Sure:\n", b"```python", b"\n", b"a = 1", b"\n", b"```", b"\nBye\n"])
    assert line_ends(tokens.ids, tokens.decode) == [4]
    assert line_ends([], tokens.decode) == []
    assert end_tokens([], ["a"]) == []
