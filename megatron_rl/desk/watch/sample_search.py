"""Searches stored responses: filter, sort, limit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.desk.watch.sample_filter import names_in, row_mask
from megatron_rl.errors import UserError
from megatron_rl.tracking.samples_file import METRICS, ROW_COLUMNS, num_rows, read_samples

_TEXTS = ("prompt", "response", "question")
"""Columns of long text. Unless the filter names them, they are read only for the rows that are shown."""
_BROKEN_TIE = ("step", "group", "sample", "id")


@dataclass(frozen=True)
class SampleQueryResult:
    """Result of a search in stored responses."""

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
    """The newest steps that together have ``limit`` rows, so that few files of a long run are read."""
    newest: list[int] = []
    for step in sorted(sizes, reverse=True):
        if sum(sizes[one] for one in newest) >= limit:
            break
        newest.append(step)
    return newest


def whole_rows(files: Mapping[int, Path], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Complete rows in the given order, with all columns, including per-token ones."""
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
