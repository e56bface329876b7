"""Searches stored responses: filter, sort, limit.

Filters such as ``reward < 0.5 and length > 200`` use Python's syntax for comparisons of columns, and are never executed. A
comparison with a missing value is neither true nor false, and a row is kept only if the whole filter is true; ``reward is None`` tests
for missing ones.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.tracking.samples_file import METRICS, ROW_COLUMNS, num_rows, read_samples

_TEXTS = ("prompt", "response", "question")
"""Columns of long text. Unless the filter names them, they are read only for the rows that are shown."""
_BROKEN_TIE = ("step", "group", "sample", "id")
HELP = (
    "reward < 0.5 and length > 200 · type in ('math', 'code') · 'boxed' in response · not finished · reward is None · "
    "(advantage > 0 or mismatch >= 0.1) and step == 5"
)
_MAX_CHARACTERS = 2000
_COMPARISONS = {
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
}
_KINDS = {"bool_": "true or false", "string": "a text", "number": "a number"}


@dataclass(frozen=True)
class SampleQueryResult:
    rows: list[dict[str, Any]]
    """Rows as dicts of ``ROW_COLUMNS``; additional reward metrics are columns also."""
    num_matches: int
    num_stored: int
    """Stored rows in the searched steps."""
    steps: Sequence[int]


def find_rows(files: Mapping[int, Path], *, steps: Sequence[int], where: str = "", sort: str = "", limit: int = 20) -> SampleQueryResult:
    """The first ``limit`` rows of ``steps`` that the filter ``where`` keeps, sorted by ``sort`` (a column, or ``column:desc``).

    Default order: newest step first. Raises UserError for an invalid filter or an unknown column.
    """
    import pyarrow.compute as compute

    wanted = names_in(where) if where else set()
    columns = [name for name in ROW_COLUMNS if name not in _TEXTS or name in wanted or name == sort.partition(":")[0]]
    sizes = {step: num_rows(files[step]) for step in steps}
    num_stored = sum(sizes.values())
    # Without filter and order the newest rows are the result, so only their files are read.
    steps_read = steps if where or sort else _newest(sizes, limit)
    table, kinds = _with_metrics(read_samples([files[step] for step in steps_read], [*columns, METRICS]))
    for name in set(_TEXTS) - set(columns):
        kinds.pop(name)
    num_unread = num_stored - table.num_rows
    if where:
        table = table.filter(row_mask(where, table, kinds))
    column, _, order = sort.partition(":")
    if (column and column not in kinds) or order not in ("", "asc", "desc"):
        raise UserError(f"sort {sort!r}: expected a column, or column:desc; columns are {', '.join(sorted(kinds))}")
    keys = [(column, "descending" if order == "desc" else "ascending")] if column else [("step", "descending")]
    keys += [(name, "ascending") for name in _BROKEN_TIE if name not in (column, keys[0][0])]
    order_of_rows = compute.sort_indices(table, sort_keys=keys)[:limit]
    rows = table.take(order_of_rows).drop_columns([name for name in _TEXTS if name in columns]).to_pylist()
    texts = _texts(files, rows) if rows else {}
    rows = [row | texts[row["step"], row["id"]] for row in rows if (row["step"], row["id"]) in texts]
    return SampleQueryResult(rows, table.num_rows + num_unread, num_stored, list(steps))


def _newest(sizes: Mapping[int, int], limit: int) -> list[int]:
    """The newest steps that together have at least ``limit`` rows, so that few files of a long run are read. ``sizes``: rows by step."""
    newest: list[int] = []
    for step in sorted(sizes, reverse=True):
        if sum(sizes[one] for one in newest) >= limit:
            break
        newest.append(step)
    return newest


def whole_rows(files: Mapping[int, Path], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Complete rows, in the order of ``rows``, with all columns, including per-token ones. ``files``: by step."""
    return [_one(files[row["step"]], row["id"]) for row in rows]


def _texts(files: Mapping[int, Path], rows: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], dict[str, str]]:
    texts = {}
    for step in sorted({row["step"] for row in rows}):
        ids = {row["id"] for row in rows if row["step"] == step}
        for text in read_samples([files[step]], ["id", *_TEXTS]).to_pylist():
            if text["id"] in ids:
                texts[step, text.pop("id")] = text
    return texts


def _one(path: Path, id: int) -> dict[str, Any]:
    import pyarrow.compute as compute

    table = read_samples([path])
    (row,) = table.filter(compute.equal(table["id"], id)).to_pylist()
    return row | {METRICS: dict(row[METRICS])}


def _with_metrics(table: Any) -> tuple[Any, dict[str, str]]:
    """Returns (table with a column per additional reward metric, kinds of all columns). Existing column names win."""
    import pyarrow

    kinds = dict(ROW_COLUMNS)
    by_row = [dict(pairs or ()) for pairs in table[METRICS].to_pylist()]
    table = table.drop_columns([METRICS])
    for name in sorted({name for metrics in by_row for name in metrics}):
        if name not in kinds:
            kinds[name] = "float64"
            table = table.append_column(name, pyarrow.array([metrics.get(name) for metrics in by_row], pyarrow.float64()))
    return table, kinds


def row_mask(text: str, table: Any, kinds: Mapping[str, str]) -> Any:
    """Boolean array: True for each row of a ``pyarrow.Table`` that ``text`` keeps. Raises UserError for an invalid filter.

    ``kinds``: type of each column that the filter may name, as in ``ROW_COLUMNS``.
    """
    return _Filter(text, table, kinds).mask()


def names_in(text: str) -> set[str]:
    """Columns that a filter names. Raises UserError for an invalid expression."""
    return {node.id for node in ast.walk(_parsed(text)) if isinstance(node, ast.Name)}


def _parsed(text: str) -> ast.expr:
    try:
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"it has {len(text)} characters, at most {_MAX_CHARACTERS} are allowed")
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        problem = error.msg if isinstance(error, SyntaxError) else str(error)
        hint = "; equality is ==" if "==" not in text and "=" in text.replace("<=", "").replace(">=", "").replace("!=", "") else ""
        raise UserError(f"filter {text[:80]!r}: {problem}{hint}. Filters look like: {HELP}") from error


class _Filter:
    def __init__(self, text: str, table: Any, kinds: Mapping[str, str]) -> None:
        self._text, self._table, self._kinds = text, table, kinds
        self._root = _parsed(text)

    def mask(self) -> Any:
        import pyarrow.compute

        try:
            return pyarrow.compute.fill_null(self._truth(self._root), False)
        except RecursionError as error:
            raise self._wrong("it is nested too deeply") from error

    def _truth(self, node: ast.expr) -> Any:
        """Evaluate ``node`` to a boolean array with nulls."""
        import pyarrow.compute as compute

        match node:
            case ast.BoolOp(op=op, values=[first, *others]):
                join = compute.and_kleene if isinstance(op, ast.And) else compute.or_kleene
                truth = self._truth(first)
                for other in others:
                    truth = join(truth, self._truth(other))
                return truth
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return compute.invert(self._truth(inner))
            case ast.Compare(left=left, ops=ops, comparators=rights):
                truth = None
                for one, comparison, two in zip([left, *rights], ops, rights, strict=False):
                    part = self._compared(one, comparison, two)
                    truth = part if truth is None else compute.and_kleene(truth, part)
                return truth
            case ast.Name() | ast.Constant(value=bool()):
                kind, value = self._value(node)
                if kind != "bool_":
                    raise self._wrong(f"{self._source(node)} is {_KINDS[kind]}, not true or false; compare it with something")
                return self._filled(value)
        raise self._wrong(f"{self._source(node)} is not a condition")

    def _compared(self, one: ast.expr, op: ast.cmpop, two: ast.expr) -> Any:
        import pyarrow
        import pyarrow.compute as compute

        if isinstance(two, ast.Constant) and two.value is None and isinstance(op, ast.Is | ast.IsNot | ast.Eq | ast.NotEq):
            missing = compute.is_null(self._filled(self._value(one)[1]))
            return missing if isinstance(op, ast.Is | ast.Eq) else compute.invert(missing)
        if isinstance(op, ast.In | ast.NotIn):
            contained = self._contained(one, two)
            return contained if isinstance(op, ast.In) else compute.invert(contained)
        if type(op) not in _COMPARISONS:
            raise self._wrong(f"{self._source(two)}: `is` compares only with None")
        (kind, left), (other, right) = self._value(one), self._value(two)
        if kind != other:
            raise self._wrong(f"{self._source(one)} is {_KINDS[kind]} and {self._source(two)} is {_KINDS[other]}")
        if kind == "bool_" and not isinstance(op, ast.Eq | ast.NotEq):
            raise self._wrong(f"{self._source(one)} is true or false and cannot be ordered")
        both = [pyarrow.scalar(side) if isinstance(side, bool | int | float | str) else side for side in (left, right)]
        if all(isinstance(side, pyarrow.Scalar) for side in both):
            both[0] = self._filled(both[0])
        return getattr(compute, _COMPARISONS[type(op)])(*both)

    def _contained(self, one: ast.expr, two: ast.expr) -> Any:
        """Evaluate ``one in two``, per row: a text contained in a column of texts, or a column's value equal to an item of a list."""
        import pyarrow
        import pyarrow.compute as compute

        kind, value = self._value(one)
        if isinstance(two, ast.List | ast.Tuple | ast.Set):
            items = [self._value(item) for item in two.elts]
            if any(other != kind for other, _ in items) or any(isinstance(item, ast.Name) for item in two.elts):
                raise self._wrong(f"{self._source(one)} is {_KINDS[kind]}; the list must contain such values")
            values = pyarrow.array([item for _, item in items], pyarrow.float64() if kind == "number" else None)
            column = self._filled(value)
            column = column.cast(pyarrow.float64()) if kind == "number" else column
            # is_in returns False for a missing value; a comparison must give null.
            return compute.if_else(compute.is_null(column), None, compute.is_in(column, values))
        other, column = self._value(two)
        if kind != "string" or other != "string" or not isinstance(value, str) or isinstance(column, str):
            raise self._wrong("`in` needs 'words' in a column of texts, or a column in a list")
        return compute.match_substring(column, value)

    def _value(self, node: ast.expr) -> tuple[str, Any]:
        """Returns (kind of values, a key of ``_KINDS``; column or constant) of ``node``."""
        match node:
            case ast.Name(id=name):
                if name not in self._kinds:
                    raise self._wrong(f"column {name!r} does not exist; columns are {', '.join(sorted(self._kinds))}")
                kind = self._kinds[name]
                return kind if kind in _KINDS else "number", self._table[name]
            case ast.Constant(value=bool(value)):
                return "bool_", value
            case ast.Constant(value=int(value) | float(value)):
                # Larger integers do not fit Arrow's int64.
                return "number", float(value) if abs(value) > 2**62 else value
            case ast.Constant(value=str(value)):
                return "string", value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value) | float(value))):
                return "number", -float(value)
        raise self._wrong(f"{self._source(node)}: expected a column, a number or a text in quotes")

    def _filled(self, value: Any) -> Any:
        """A column; a constant is repeated for every row."""
        import pyarrow

        if isinstance(value, pyarrow.ChunkedArray | pyarrow.Array):
            return value
        return pyarrow.repeat(value, self._table.num_rows)

    def _source(self, node: ast.expr) -> str:
        return repr(ast.unparse(node)[:60])

    def _wrong(self, problem: str) -> UserError:
        return UserError(f"filter {self._text[:80]!r}: {problem}. Filters look like: {HELP}")
