"""`megatron-rl config`: explain every key of a recipe by type, default, bound and meaning. Also writes docs/configuration.md."""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence

from megatron_rl.config.keys import ConfigKey, ConfigSection, near_misses, sections
from megatron_rl.errors import ConfigError

_HEAD = """\
# Configuration

A recipe is a YAML file of sections with keys; `--config` takes several, and later ones win. `preset: tppo` puts a preset's
values below the recipe's own (`megatron-rl presets` lists the presets). `key=value` on the command line overrides both:
`batch.window_tokens=8192`, `data.train_files=[a.jsonl]`. `megatron-rl train --config recipe.yaml --dry-run` prints what
follows from a recipe. An unknown key is an error that names the one you may have meant.

`megatron-rl config` prints this page in the terminal, `megatron-rl config rollout.fire` one section of it and
`megatron-rl config batch.window_tokens` one key.

This page is generated from the schema (`megatron_rl/config/schema`): `megatron-rl config --markdown > docs/configuration.md`.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", default="", help="a section (rollout.fire) or a key (batch.window_tokens); default: all"
    )
    parser.add_argument("--markdown", action="store_true", help="print the page docs/configuration.md")


def run(arguments: argparse.Namespace) -> int:
    if arguments.markdown:
        print(markdown(), end="")
        return 0
    name = arguments.name
    key = next((key for section in sections() for key in section.keys if key.name == name), None)
    inside = [section for section in sections() if not name or f"{section.name}.".startswith(f"{name}.")]
    if not key and not inside:
        close = near_misses(name, limit=3)
        remedy = f"did you mean {' or '.join(close)}?" if close else "`megatron-rl config` lists all of them"
        raise ConfigError(f"{name!r} is neither a section nor a key; {remedy}")
    _print([key] if key else [], inside)
    return 0


def _print(keys: Sequence[ConfigKey], inside: Sequence[ConfigSection]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # A file or a pipe has no width; a wide one keeps each key on a single line, which grep finds.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    for key in keys:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for label, value in _facts(key):
            table.add_row(Text(label, style="dim"), Text(value))
        console.print(Text(key.name, style="bold"), table, sep="\n")
    for section in inside:
        if section.name:
            console.print(Text(f"\n{section.name}", style="bold"), Text(section.meaning), sep="\n")
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for heading in ("key", "type", "default", "bound"):
            table.add_column(heading, overflow="fold")
        table.add_column("meaning", ratio=1, min_width=30)
        for key in section.keys:
            choices = [f"{value}: {meaning}" for value, meaning in _choices(key).items()]
            cells = (key.name, key.type, key.default, key.bound, "\n".join([key.meaning, *choices]))
            table.add_row(*map(Text, cells))
        console.print(table)


def _facts(key: ConfigKey) -> Iterator[tuple[str, str]]:
    yield "meaning", key.meaning
    yield "type", key.type
    yield "default", key.default
    if key.bound:
        yield "bound", key.bound
    yield from (("choice", f"{value}: {text}") for value, text in _choices(key).items())


def _choices(key: ConfigKey) -> Mapping[str, str]:
    """Maps each choice to its meaning; for a pluggable part of the algorithm, its registered names."""
    if not key.name.startswith("algorithm."):
        return key.choices
    from megatron_rl.algorithms.register import SEAMS  # imports torch, which other sections do not need

    seam = SEAMS.get(key.name.removeprefix("algorithm."))
    return seam.summaries() if seam else key.choices


def markdown() -> str:
    """The text of docs/configuration.md."""
    contents = [
        f"{'    ' * ('.' in section.name)}- [`{section.name}`](#{_anchor(section.name)}): {section.meaning}"
        for section in sections()
        if section.name
    ]
    parts = [_HEAD, "## Sections\n", "\n".join(contents) + "\n"]
    for section in sections():
        title = f"`{section.name}`" if section.name else "The top of a recipe"
        parts.append(f"{'###' if '.' in section.name else '##'} {title}\n\n{section.meaning}\n")
        parts.append(_table(section) if _first_of_its_kind(section) is section else _differences(section))
    return "\n".join(parts)


def _anchor(name: str) -> str:
    """GitHub's anchor of a heading, without the ``#``."""
    return re.sub(r"[^a-z0-9_-]", "", name.lower())


def _first_of_its_kind(section: ConfigSection) -> ConfigSection:
    """The outermost section with the same schema; docs/configuration.md lists the keys only there."""
    return min((s for s in sections() if s.schema is section.schema), key=lambda s: s.name.count("."))


def _table(section: ConfigSection) -> str:
    lines = ["| key | type | default | bound | meaning |", "|---|---|---|---|---|"]
    for key in section.keys:
        meaning = "<br>".join([key.meaning, *(f"`{value}`: {text}" for value, text in _choices(key).items())])
        name = key.name.removeprefix(f"{section.name}.")
        default = key.default if key.default != "''" else "empty"
        cells = (f"`{name}`", f"`{key.type}`" if "[" in key.type else key.type, default, key.bound, meaning)
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _differences(section: ConfigSection) -> str:
    first = _first_of_its_kind(section)
    pairs = [(key, like) for key, like in zip(section.keys, first.keys, strict=True) if key.default != like.default]
    changed = ", ".join(f"`{key.name.rsplit('.', 1)[-1]}` {key.default}" for key, _ in pairs)
    other = f"; defaults that differ: {changed}" if changed else ", with the same defaults"
    return f"The keys of [`{first.name}`](#{_anchor(first.name)}){other}.\n"


def _cell(text: str) -> str:
    # Escape tags, which would vanish, and bars, which would end the cell.
    return re.sub(r"<(?!br>)", "&lt;", text).replace("|", r"\|")
