"""``samples/step_000005.parquet``: one row per stored response of a step, for any reader of Parquet.

Invariants: a file appears atomically; steps count from 1, as in metrics.jsonl; a response has one row in each step
in which it was stored; per-token columns have one entry per token of the response, not of the prompt.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.system.files.atomic_files import write_atomic

FOLDER = "samples"
TOKEN_COLUMNS = {
    "prompt_ids": "int32",
    "token_ids": "int32",
    "token_ends": "int32",
    "mask": "bool_",
    "rollout_logprobs": "float32",
    "trainer_logprobs": "float32",
    "advantages": "float32",
    "values": "float32",
}
"""Per-token lists. ``token_ends``: end of each token in ``response``. ``mask``: tokens in this step's policy loss. Log-probs: at sampling,
and of the trainer before its update. Advantages: as the loss read them. Values: the critic's. NaN: not computed in this step."""
SEGMENT_COLUMNS = {
    "num_tokens": "int32",
    "step": "int32",
    "weight_version": "int32",
    "turn": "int32",
    "role": "string",
    "finish_reason": "string",
    "waited_s": "float64",
}
"""Fields of a segment: step and weight version that sampled it, and its role. A segment is one request's tokens or a message, which
has the seconds that the environment took for it (null: not measured)."""
TURN_COLUMNS = {"turn": "int32", "reward": "float64", "detail": "string", "error": "string"}
ROW_COLUMNS = {
    "step": "int32",
    "id": "int64",
    "group": "int64",
    "sample": "int32",
    "prompt_id": "string",
    "type": "string",
    "reward": "float64",
    "finished": "bool_",
    "end": "string",
    "greedy": "bool_",
    "parent": "int64",
    "num_turns": "int32",
    "waited_s": "float64",
    "prompt_tokens": "int32",
    "length": "int32",
    "new_tokens": "int32",
    "trained_tokens": "int32",
    "advantage": "float64",
    "mismatch": "float64",
    "logprob": "float64",
    "oldest_version": "int32",
    "newest_version": "int32",
    "detail": "string",
    "error": "string",
    "question": "string",
    "prompt": "string",
    "response": "string",
    "answer": "string",
}
"""Columns with one value per response, usable in filters and for sorting (docs/samples.md describes them)."""
METRICS = "reward_metrics"
_NAME = re.compile(r"step_(\d+)\.parquet")


def sample_files(run: str | Path) -> dict[int, Path]:
    """Files of the stored steps, keyed by step, ascending."""
    files = {int(match[1]): path for path in (Path(run) / FOLDER).glob("*.parquet") if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(files.items()))


def write_samples(run: str | Path, step: int, columns: Mapping[str, Sequence[Any]]) -> Path:
    """Write the rows of a step. Raises OSError.

    ``columns``: all of ``ROW_COLUMNS``. For ``TOKEN_COLUMNS``, an array per response (None in the column of
    values). For ``segments`` and ``turns``, a list of tuples per response. For ``METRICS``, a mapping per
    response.
    """
    import pyarrow
    import pyarrow.parquet

    arrays = {name: pyarrow.array(columns[name], _type(kind)) for name, kind in ROW_COLUMNS.items()}
    arrays |= {name: _lists(columns[name], kind) for name, kind in TOKEN_COLUMNS.items()}
    arrays |= {name: pyarrow.array(columns[name], pyarrow.list_(_struct(kinds))) for name, kinds in _NESTED.items()}
    arrays[METRICS] = pyarrow.array(
        [list(one.items()) for one in columns[METRICS]], pyarrow.map_(pyarrow.string(), pyarrow.float64())
    )
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(arrays), sink, compression="zstd")
    return write_atomic(Path(run) / FOLDER / f"step_{step:06d}.parquet", sink.getvalue().to_pybytes())


def read_samples(files: Iterable[Path], columns: Sequence[str] | None = None) -> Any:
    """All rows of ``files`` in a ``pyarrow.Table``; a missing file is skipped, because a running run removes old steps. A column that
    an older version did not write is null.

    ``columns`` None: all. Raises UserError for an unreadable file, or if all are missing.
    """
    import pyarrow
    import pyarrow.parquet

    tables = []
    for path in files:
        try:
            stored = set(pyarrow.parquet.read_schema(path).names)
            names = None if columns is None else [name for name in columns if name in stored]
            tables.append(pyarrow.parquet.read_table(path, columns=names, partitioning=None))
        except FileNotFoundError:
            continue  # a running run has just removed this step to save space
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{path}: not a complete file of samples: {str(error).splitlines()[0]}; remove it") from error
    if not tables:
        raise UserError("the run has just removed the stored steps; try again")
    table = pyarrow.concat_tables(tables, promote_options="permissive")
    for name, kind in ROW_COLUMNS.items():
        if name in (columns or ROW_COLUMNS) and name not in table.column_names:
            table = table.append_column(name, pyarrow.nulls(table.num_rows, _type(kind)))
    return table


def num_rows(path: Path) -> int:
    """Rows of a file; 0 if it cannot be read."""
    import pyarrow
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(path).num_rows)
    except (pyarrow.ArrowException, OSError):
        return 0


_NESTED = {"segments": SEGMENT_COLUMNS, "turns": TURN_COLUMNS}


def _type(kind: str) -> Any:
    import pyarrow

    return getattr(pyarrow, kind)()


def _struct(kinds: Mapping[str, str]) -> Any:
    import pyarrow

    return pyarrow.struct([(name, _type(kind)) for name, kind in kinds.items()])


def _lists(arrays: Sequence[Any], kind: str) -> Any:
    """Convert arrays to Arrow lists, without an object per token."""
    import numpy as np
    import pyarrow

    offsets = np.cumsum([0, *(0 if one is None else len(one) for one in arrays)]).astype(np.int32)
    values = pyarrow.array(np.concatenate([np.zeros(0), *(one for one in arrays if one is not None)]), _type(kind), safe=False)
    is_null = [one is None for one in arrays]
    return pyarrow.ListArray.from_arrays(offsets, values, mask=pyarrow.array(is_null) if any(is_null) else None)
