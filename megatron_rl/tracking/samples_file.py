"""``samples/step_000005.parquet``: a row for each stored response of a step, readable by anything that reads Parquet.

Invariants: a file appears whole or not at all; steps count from 1, as in metrics.jsonl; a response has one row in each step that
it was stored in; per-token columns speak of the response's tokens (not the prompt's), one entry each.
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
"""Lists of numbers: ids and where each token ends in ``response``; what the policy loss counted in this step; log-probs at sampling, and
those of the trainer before its update; advantages as the loss read them; the critic's values. NaN: not computed in this step."""
SEGMENT_COLUMNS = {
    "num_tokens": "int32",
    "step": "int32",
    "weight_version": "int32",
    "turn": "int32",
    "role": "string",
    "finish_reason": "string",
}
"""Of each stretch of tokens that one request gave, or one message: which step and which weights sampled it, and who speaks."""
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
"""One value per response: these can be filtered and sorted by (docs/samples.md says what each is)."""
METRICS = "reward_metrics"
_NAME = re.compile(r"step_(\d+)\.parquet")


def sample_files(run: str | Path) -> dict[int, Path]:
    """The stored steps of a run, ascending."""
    found = {int(match[1]): path for path in (Path(run) / FOLDER).glob("*.parquet") if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def write_samples(run: str | Path, step: int, columns: Mapping[str, Sequence[Any]]) -> Path:
    """Write the rows of a step. Raises OSError.

    ``columns``: all of ``ROW_COLUMNS``; of ``TOKEN_COLUMNS`` an array for each response, or None for the column of values; ``segments`` and
    ``turns`` a list of tuples for each; ``METRICS`` a mapping for each.
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
    """One ``pyarrow.Table`` of the rows of ``files``; None: all columns. UserError for a file that cannot be read."""
    import pyarrow
    import pyarrow.parquet

    tables = []
    for path in files:
        try:
            tables.append(pyarrow.parquet.read_table(path, columns=columns, partitioning=None))
        except FileNotFoundError:
            continue  # thinned out meanwhile by a run that goes on
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{path}: not a whole file of samples: {str(error).splitlines()[0]}; remove it") from error
    if not tables:
        raise UserError("the stored steps were removed meanwhile by a run that goes on; ask again")
    return pyarrow.concat_tables(tables)


def num_rows(path: Path) -> int:
    """Of a file; 0 for one that cannot be read."""
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
    """Arrays -> lists of Arrow, without an object per token."""
    import numpy as np
    import pyarrow

    offsets = np.cumsum([0, *(0 if one is None else len(one) for one in arrays)]).astype(np.int32)
    values = pyarrow.array(np.concatenate([np.zeros(0), *(one for one in arrays if one is not None)]), _type(kind), safe=False)
    is_null = [one is None for one in arrays]
    return pyarrow.ListArray.from_arrays(offsets, values, mask=pyarrow.array(is_null) if any(is_null) else None)
