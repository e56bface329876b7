"""Names of the library that tests and programs use without importing them."""

import ast
import sys
from functools import lru_cache
from importlib import import_module
from typing import Any

from megatron_rl.graders.analysis.code_cases import IMPORTS

_LIBRARY = IMPORTS + (
    "from copy import copy, deepcopy; from decimal import Decimal; from fractions import Fraction\n"
    "from dataclasses import *; from datetime import date, timedelta; from operator import itemgetter, attrgetter\n"
)
_ALIASES = {"np": "numpy", "pd": "pandas", "sp": "sympy", "nx": "networkx"} | {
    name: name for name in "numpy pandas pytest scipy sympy torch networkx".split()
}


def library_value(name: str, is_module: bool) -> Any:
    """The module ``name``, or the value that the usual imports give to ``name``."""
    if is_module:
        return import_module(_ALIASES.get(name, name))
    return _usual_imports()[name]


@lru_cache(maxsize=1)
def _usual_imports() -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(_LIBRARY, namespace)
    return namespace


def library_names(tree: ast.AST, names: frozenset[str]) -> dict[str, bool]:
    """The subset of ``names`` that tests use as names of the library; True for a module. Tests that import a module write its name
    before the names in it."""
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    nodes = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    bases = {node.id for node in nodes if isinstance(node, ast.Name)}
    modules = {name for name in names & bases if name in sys.stdlib_module_names or name in _ALIASES}
    found = {name for name in names & _usual_imports().keys() if _home_of(_usual_imports()[name]) not in imported}
    return {name: name in modules for name in modules | found}


def _home_of(value: Any) -> str:
    return str(getattr(value, "__module__", "")).lstrip("_")
