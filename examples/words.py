"""Code shared by the judge examples: an untrained model whose tokens are words and characters, and digits to be sorted.

Invariants: the same arguments write the same bytes; a row of digits belongs to training or is held out, which follows
from the digits alone, so that no order of held-out digits occurs in training.
"""

import random
import re
import string
from collections.abc import Iterator, Sequence
from pathlib import Path

from tiny_model import SPECIAL_TOKENS, write_tiny_model

from megatron_rl.rewards.judges.templates import JUDGE_TEMPLATE, PAIRWISE_TEMPLATE

TOKEN_PATTERN = r"[A-Za-z]+|[\s\S]"
"""A token is a word or a single character."""
LENGTHS = (3, 6)
"""Digits in a prompt, from and to."""
HELD_OUT_SHARE = 5
"""One in so many digit rows is held out."""


def vocabulary(words: Sequence[str]) -> list[str]:
    """Special tokens, ``words``, the words of the judges' templates, all printable characters."""
    fixed_text = re.sub(r"\{\w+\}", "", PAIRWISE_TEMPLATE + JUDGE_TEMPLATE)
    return [*SPECIAL_TOKENS, *sorted({*re.findall(r"[A-Za-z]+", fixed_text), *words, *string.printable})]


def write_model_folder(folder: Path, words: Sequence[str]) -> None:
    """An untrained model; each of ``words`` is one token, and the vocabulary leaves room for tensor parallelism."""
    write_tiny_model(folder, vocabulary(words), TOKEN_PATTERN, vocab_size=192, max_tokens=512)


def digit_rows(count: int, *, held_out: bool, seed: int) -> Iterator[list[int]]:
    """Unsorted rows of different digits; which side a row is on follows from its digits alone."""
    generator = random.Random(f"{seed} digits {held_out}")
    while count:
        digits = generator.sample(range(1, 10), generator.randint(*LENGTHS))
        is_held_out = sum(digit * 7**place for place, digit in enumerate(sorted(digits))) % HELD_OUT_SHARE == 0
        if digits != sorted(digits) and is_held_out == held_out:
            count -= 1
            yield digits


def near_miss(digits: Sequence[int], generator: random.Random) -> list[int]:
    """``digits`` sorted, but for two neighbours that have changed places."""
    row = sorted(digits)
    place = generator.randrange(len(row) - 1)
    row[place], row[place + 1] = row[place + 1], row[place]
    return row


def joined(digits: Sequence[int]) -> str:
    return "".join(map(str, digits))
