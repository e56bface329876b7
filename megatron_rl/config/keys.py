"""Describes every key of a recipe, for the documentation, `megatron-rl config` and suggestions on misspelled keys."""

import ast
import difflib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, get_args, get_origin

import yaml

from megatron_rl.config.schema import Config


@dataclass(frozen=True)
class ConfigKey:
    name: str
    """Full name: batch.window_tokens."""
    type: str
    """Type in Python's notation, or ``choice`` for a value of ``choices``."""
    default: str
    """Default in YAML notation."""
    bound: str
    """Expectation of the key's bound, or an empty string."""
    choices: dict[str, str]
    """Maps each choice to its meaning."""
    meaning: str


@dataclass(frozen=True)
class ConfigSection:
    name: str
    """Full name: algorithm.kl. N is an item of a list, NAME a name of the user's. Empty: the top level of a recipe."""
    schema: type
    """Dataclass of the section; sections with the same dataclass have the same keys, but may have other defaults."""
    meaning: str
    keys: tuple[ConfigKey, ...]


@cache
def sections() -> tuple[ConfigSection, ...]:
    """All sections in the schema's order, outer before inner."""
    return tuple(_sections("", Config()))


def near_misses(name: str, *, limit: int = 1) -> list[str]:
    """Keys and sections that ``name`` may mean, the nearest first.

    A similar word in the same section is nearest, then the same word below that section, a longer word of the section with
    it, the same word anywhere, and the most similar name. A name that is only somewhat similar is left out, because a wrong
    hint costs more than none.
    """
    known = [key.name for section in sections() for key in section.keys]
    known += [section.name for section in sections() if section.name]
    section, _, word = name.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == section}
    similar = difflib.get_close_matches(word, siblings, n=limit, cutoff=0.7)
    same_word = [other for other in known if other.rpartition(".")[2] == word]
    below = [other for other in same_word if section and other.startswith(f"{section}.")]
    parts = [other for one, other in siblings.items() if word in one.split("_")]
    found = [siblings[one] for one in similar] + below + parts + same_word or difflib.get_close_matches(name, known, n=limit, cutoff=0.85)
    return list(dict.fromkeys(found))[:limit]


def keys_in(section: str) -> list[str]:
    """Words of the keys and sections directly in ``section``; empty for a section that does not exist."""
    names = [key.name for one in sections() for key in one.keys] + [one.name for one in sections()]
    return [name.rpartition(".")[2] for name in names if name and name.rpartition(".")[0] == section]


def _sections(name: str, value: Any) -> Iterator[ConfigSection]:
    texts = _texts_below(type(value))
    keys: list[ConfigKey] = []
    inside: list[ConfigSection] = []
    for item in fields(value):
        part, full = getattr(value, item.name), f"{name}.{item.name}".lstrip(".")
        nested = _nested(item.type)
        if not is_dataclass(part):
            expected, _ = item.metadata.get("bound", ("", None))
            keys.append(ConfigKey(full, _type(item.type), _shown(part), expected, _choices(item.type), texts[item.name]))
        if nested:
            inside += _sections(full + _placeholder(item.type), part if is_dataclass(part) else nested())
    yield ConfigSection(name, type(value), _clean(type(value).__doc__ or ""), tuple(keys))
    yield from inside


def _nested(annotation: Any) -> Any:
    """Dataclass of the section in a field, optional field, list or mapping; None for a plain value."""
    kinds: tuple[Any, ...] = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if is_dataclass(kind)), None)


def _placeholder(annotation: Any) -> str:
    origin: Any = get_origin(annotation)
    return {list: ".N", dict: ".NAME"}.get(origin, "")


def _type(annotation: Any) -> str:
    if _nested(annotation):
        return {".N": "list of sections", ".NAME": "sections by name"}.get(_placeholder(annotation), "section or null")
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        return "choice"
    return str(annotation).replace("typing.", "") if get_args(annotation) else annotation.__name__


def _choices(annotation: Any) -> dict[str, str]:
    if not (inspect.isclass(annotation) and issubclass(annotation, Enum)):
        return {}
    texts = _texts_below(annotation)
    return {str(member.value): texts[member.name] for member in annotation}


def _shown(value: object) -> str:
    plain = value.value if isinstance(value, Enum) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()


def _texts_below(schema: type) -> dict[str, str]:
    """Map each field of a dataclass, or member of an Enum, to its docstring in the source; empty if there is none."""
    (body,) = ast.parse(inspect.getsource(schema)).body
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for node, following in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.AnnAssign | ast.Assign):
            (target,) = node.targets if isinstance(node, ast.Assign) else [node.target]
            below = following.value if isinstance(following, ast.Expr) else None
            texts[ast.unparse(target)] = _clean(str(below.value)) if isinstance(below, ast.Constant) else ""
    return texts


def _clean(text: str) -> str:
    return " ".join(text.replace("``", "").split())
