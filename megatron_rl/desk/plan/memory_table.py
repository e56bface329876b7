"""`train --dry-run`: what a run keeps on a GPU, stage by stage, whether that fits, and which keys to change where not."""

import copy
from collections.abc import Container, Iterator, Sequence
from enum import Enum

from rich.console import Console
from rich.table import Table

from megatron_rl.config.layout import critic_layout, layout_problems
from megatron_rl.config.schema import Config
from megatron_rl.desk.costs.gpus import gpu
from megatron_rl.desk.costs.run_memory import (
    COMPONENTS,
    STATES,
    RunMemory,
    RunModel,
    memory_fraction,
    model_folders,
    models_of,
    run_memory,
)
from megatron_rl.desk.plan.memory_fit import MemoryFit, check_fit_with_fixes
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.schedule.table import GENERATE

_GPUS = ("H100-80G", "H20", "H200")
"""GPU memory sizes in use: 80, 96 and 141 GB."""
_GIGA = 1e9
_TIGHT_SHARE = 0.06
"""Less than this share of a GPU to spare is within the error of the estimates."""


def print_memory(console: Console, config: Config, world_size: int) -> None:
    """Tables of at most 80 columns; one line where the layout does not fit ``world_size`` ranks."""
    if any(True for layout in (config.parallel, critic_layout(config)) for _ in layout_problems(layout, world_size)):
        console.print("set parallel.num_ranks to the number of trainer ranks to see what they need", soft_wrap=True)
        return
    config = copy.deepcopy(config)
    config.parallel.num_ranks = world_size
    facts = {name: load_hf_config(folder) for name, folder in model_folders(config).items()}
    models = models_of(config, facts)
    memory = run_memory(config, models)
    print_stages(console, memory, models)
    verdicts = {name: check_fit_with_fixes(config, facts, gpu(name)) for name in _GPUS}
    console.print(_verdict_table(config, verdicts))
    if GENERATE in {stage.name for stage in memory.stages}:
        share = memory_fraction(config)
        console.print(f"servers that generate take {share:g} of the GPU (mem-fraction-static), weights and KV cache", soft_wrap=True)
    for line in _remedies(verdicts):
        console.print(line, soft_wrap=True)


def print_stages(console: Console, memory: RunMemory, models: Sequence[RunModel]) -> None:
    """Return the memory of a GPU by stage, and of the driver's node."""
    console.print(_stage_table(memory, models))
    ranks = {stage.rank for stage in memory.stages}
    which = ", ".join(f"{stage.name} {stage.rank}" for stage in memory.stages) if len(ranks) > 1 else str(*ranks)
    console.print(f"on the rank that holds most ({which}), all responses as long as they may be", soft_wrap=True)
    console.print()
    console.print(_host_table(memory))
    console.print()


def plain_table(*columns: str, texts: Container[str] = ()) -> Table:
    """Return a table whose first column and ``texts`` are left-aligned text; all other columns are numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index and column not in texts else "left", no_wrap=True)
    return table


def _stage_table(memory: RunMemory, models: Sequence[RunModel]) -> Table:
    table = plain_table("GB of a GPU", *(stage.name.replace("_", "\n") for stage in memory.stages))
    for name in (*(f"{model.name}: {state}" for model in models for state in STATES), *COMPONENTS):
        sizes = [stage.parts.get(name, 0.0) for stage in memory.stages]
        if any(sizes):
            table.add_row(name, *map(_gigabytes, sizes))
    table.add_row("all", *(_gigabytes(stage.total) for stage in memory.stages), style="bold")
    return table


def _host_table(memory: RunMemory) -> Table:
    table = plain_table("GB of the machine with the driver", "")
    for name, size in memory.host.items():
        table.add_row(name, _gigabytes(size))
    table.add_row("all", _gigabytes(sum(memory.host.values())), style="bold")
    return table


def _verdict_table(config: Config, verdicts: dict[str, MemoryFit]) -> Table:
    longest = config.batch.max_prompt_tokens + config.batch.max_response_tokens
    texts = ("fullest stage", "fits")
    table = plain_table("GPU", "fullest stage", "GB", "fits", "KV cache of a server", texts=texts)
    for name, found in verdicts.items():
        number = int(found.kv_tokens // longest)
        cache = f"{number} x {longest:,} tokens" if number > 0 else "too small"
        table.add_row(_size(name), found.stage, _gigabytes(found.needed), _word(found, gpu(name).hbm_bytes), cache)
    return table


def _word(found: MemoryFit, hbm_bytes: float) -> str:
    if found.problem:
        return f"no: {found.problem}"
    spare = hbm_bytes - found.needed
    return f"{'tightly' if spare < _TIGHT_SHARE * hbm_bytes else 'yes'}, {_gigabytes(spare)} GB free"


def _remedies(verdicts: dict[str, MemoryFit]) -> Iterator[str]:
    for name, found in verdicts.items():
        if found.changes:
            keys = " ".join(f"{key}={_text(value)}" for key, value in found.changes.items())
            yield f"to fit {_size(name)}: {keys} ({_gigabytes(found.needed_after)} GB)"
        elif found.problem:
            yield f"to fit {_size(name)}: no recomputation, layout or up to 8 times the ranks is enough; take a smaller batch"


def _size(name: str) -> str:
    return f"{gpu(name).hbm_bytes / _GIGA:.0f} GB"


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / _GIGA:,.1f}" if num_bytes else "-"


def _text(value: object) -> str:
    text = value.value if isinstance(value, Enum) else value
    return str(text).lower() if isinstance(text, bool) else str(text)
