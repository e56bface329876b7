"""How evaluations sample, and what their sets are called."""

import re
from collections.abc import Iterator

from megatron_rl.config.derived import eval_sets
from megatron_rl.config.schema import Config

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_TAKEN = ("reward", "dialogue")
"""eval/<these>/... are metrics over all sets."""


def problems(config: Config) -> Iterator[str]:
    if config.data.eval_files and config.eval.sets:
        yield (
            "eval.sets: data.eval_files is a set already, one without a name; give its files a name in eval.sets and "
            "leave data.eval_files empty"
        )
    for name, given in config.eval.sets.items():
        if not _NAME.fullmatch(name) or name in _TAKEN:
            yield (
                f"eval.sets: {name!r} becomes part of metrics' names: expected letters, digits, _ . and -, and none of "
                f"{', '.join(_TAKEN)}"
            )
        if not given.files:
            yield f"eval.sets.{name}.files: expected at least one file, got none"
    for name, one in eval_sets(config).items():
        key = f"eval.sets.{name}" if name else "eval"
        if one.temperature != 0:
            continue
        if one.num_samples > 1:
            yield (
                f"{key}.num_samples: {one.num_samples} samples at temperature 0 are {one.num_samples} times the same "
                f"response; set {key}.temperature above 0 (the papers: 0.6 or 1), or num_samples=1"
            )
        if (one.top_p, one.top_k) != (1.0, -1):
            yield (
                f"{key}.top_p, top_k: temperature 0 takes the likeliest token whatever they are, got {one.top_p} and "
                f"{one.top_k}; set {key}.temperature above 0, or leave them at 1 and -1"
            )
