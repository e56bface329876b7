"""Types for argparse: positive numbers, so that an error includes the flag; and the split of recipes and overrides."""

import argparse
import math
from collections.abc import Sequence
from typing import Any


def positive_int(text: str) -> int:
    """Parse a whole number above 0. Raises ArgumentTypeError, which argparse prints with the flag."""
    if not text.isdecimal() or not 0 < len(text) < 16 or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def number_or_word(text: str) -> int | str:
    """Parse one of an option's whole numbers above 0; a recipe or an override that follows them stays text."""
    return text if "=" in text or text.endswith((".yaml", ".yml")) else positive_int(text)


def keep_numbers(arguments: argparse.Namespace, option: str) -> None:
    """Move the text that ``number_or_word`` kept from an option to ``arguments.words``."""
    values = getattr(arguments, option) or []
    arguments.words = [*arguments.words, *(value for value in values if isinstance(value, str))]
    setattr(arguments, option, [value for value in values if isinstance(value, int)])


def positive_number(text: str) -> float:
    """Parse a number above 0 and at most 1e7 (four months in seconds). Raises ArgumentTypeError."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= 1e7:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and up to 1e7, got {text!r}")
    return number


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(paths of recipes, ``key=value`` overrides)."""
    return [word for word in words if "=" not in word], [word for word in words if "=" in word]


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """Parse ``key=value`` overrides to options; values are YAML, dots nest."""
    from omegaconf import OmegaConf

    options = OmegaConf.to_container(OmegaConf.from_dotlist(list(words)))
    return {str(key): value for key, value in options.items()} if isinstance(options, dict) else {}
