"""Template arguments of a row: arguments such as ``enable_thinking``, and tools."""

import json
from collections.abc import Mapping
from typing import Any

from megatron_rl.config.checks.data_settings import TAKEN_ARGUMENTS, reserved_argument_problem
from megatron_rl.config.schema import DataConfig
from megatron_rl.data.row_files import Row, describe, is_missing, lookup, not_json
from megatron_rl.errors import DataError

TOOLS = "tools"


def chat_arguments(row: Row, place: str, data: DataConfig, *, chat: bool) -> dict[str, Any]:
    """Keyword arguments of ``apply_chat_template`` for this row: the recipe's, overridden by the row's, and its tools.

    ``chat``: the prompt goes through the template; otherwise the result is empty. Raises DataError with source and
    field for values of another type, and for arguments that would not be read.
    """
    own, tools = _arguments(row, place, data), _tools(row, place, data)
    given = {data.chat_template_kwargs_field: own, data.tools_field: tools}
    if chat:
        return {**data.chat_template_kwargs, **(own or {}), **({} if tools is None else {TOOLS: tools})}
    for field, value in given.items():
        if value is not None:
            raise DataError(
                f"{place}: field {field!r}: a text prompt does not go through the chat template, so the field would not be read; set "
                "data.use_chat_template=true, give the prompt as messages, or remove the field"
            )
    return {}


def _arguments(row: Row, place: str, data: DataConfig) -> dict[str, Any] | None:
    """The row's own arguments; None if it has none."""
    where = f"{place}: field {data.chat_template_kwargs_field!r}"
    value = _value(row, data.chat_template_kwargs_field, where)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise DataError(f'{where}: expected an object like {{"enable_thinking": false}}, got {describe(value)}')
    taken = sorted(set(value) & set(TAKEN_ARGUMENTS))
    if taken:
        raise DataError(f"{where}: {reserved_argument_problem(taken[0])}")
    if problem := not_json(value):
        raise DataError(f"{where}: expected JSON values, but {problem}")
    # Parquet gives every row the keys of all rows, with nulls.
    return {name: inner for name, inner in value.items() if inner is not None} or None


def _tools(row: Row, place: str, data: DataConfig) -> list[dict[str, Any]] | None:
    where = f"{place}: field {data.tools_field!r}"
    value = _value(row, data.tools_field, where)
    if value is None:
        return None
    expected = 'expected a list of JSON schemas like {"type": "function", "function": {"name": ...}}'
    if not isinstance(value, list):
        raise DataError(f"{where}: {expected}, got {describe(value)}")
    for number, tool in enumerate(value, start=1):
        if not isinstance(tool, Mapping):
            raise DataError(f"{where}: tool {number}: {expected}, got {describe(tool)}")
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise DataError(f"{where}: tool {number}: {expected}, got one without a name: {describe(dict(tool))}")
        if problem := not_json(tool):
            raise DataError(f"{where}: tool {number}: expected JSON values, but {problem}")
    return value


def _value(row: Row, field: str, where: str) -> Any:
    """Value of the column, parsed if it is JSON text; None if the value is missing or no column is configured."""
    value = lookup(row, field) if field else None
    if is_missing(value):
        return None
    if not isinstance(value, str):
        return _without_nulls(value)
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: expected an object or a list, or JSON of one, got {describe(value)} ({error})") from error


def _without_nulls(value: Any) -> Any:
    """Remove nulls, because Parquet gives every object the keys of all objects of the column."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
