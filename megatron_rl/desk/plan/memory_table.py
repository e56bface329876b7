"""Memory tables of `train --dry-run`: bytes on a GPU by stage, the fit on common GPUs, and the keys to change if a run does not fit."""

import copy
from collections.abc import Container, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_rl.config.derived import shares_devices
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
    server_memory,
    with_kv_cache,
)
from megatron_rl.desk.plan.memory_fit import MemoryFit, check_fit_with_fixes
from megatron_rl.families.family import ModelConfig
from megatron_rl.families.model_facts import as_config

_GPUS = ("H100-80G", "H20", "H200")
"""GPU memory sizes in use: 80, 96 and 141 GB."""
_GIGA = 1e9
_TIGHT_SHARE = 0.06
"""Share of a GPU; less free memory is within the error of the estimates."""


def print_memory(console: Console, config: Config, world_size: int) -> None:
    """Print tables of at most 80 columns, or one line if the layout does not fit ``world_size`` ranks."""
    if any(True for layout in (config.parallel, critic_layout(config)) for _ in layout_problems(layout, world_size)):
        console.print("set parallel.num_ranks to the number of trainer ranks to see their memory", soft_wrap=True)
        return
    from megatron_rl.models.hf.model_config import load_hf_config  # transformers, which a plan does not need

    config = copy.deepcopy(config)
    config.parallel.num_ranks = world_size
    facts = {name: _plain(load_hf_config(folder).to_dict()) for name, folder in model_folders(config).items()}
    models = models_of(config, facts)
    print_stages(console, config, models, gpu(_GPUS[0]).hbm_bytes)
    verdicts = {name: check_fit_with_fixes(config, facts, gpu(name)) for name in _GPUS}
    console.print(_verdict_table(config, verdicts))
    share = f"{memory_fraction(config):g} of the GPU (mem-fraction-static)"
    console.print(f"servers that generate use {share} for weights and KV cache; the table: on {_size(_GPUS[0])}", soft_wrap=True)
    for line in _remedies(verdicts):
        console.print(line, soft_wrap=True)


def _plain(model: dict[str, Any]) -> ModelConfig:
    """Return the values of a transformers configuration in its structure; their counts are cached, and fixes take many trials."""
    text = model.get("text_config")
    return as_config(model | ({"text_config": as_config(text)} if isinstance(text, dict) else {}))


def print_stages(console: Console, config: Config, models: list[RunModel], hbm_bytes: float) -> None:
    """Print the memory of a GPU with ``hbm_bytes`` by stage, of a server's GPU if servers have their own, and of the driver's node."""
    memory = run_memory(config, models)
    filled = with_kv_cache(config, memory, hbm_bytes)
    columns = {stage.name.replace("_", "\n"): stage.parts for stage in filled.stages}
    if not shares_devices(config.rollout):
        columns["server"] = server_memory(config, memory, hbm_bytes)
    console.print(_stage_table(columns, models))
    ranks = {stage.rank for stage in memory.stages}
    which = ", ".join(f"{stage.name} {stage.rank}" for stage in memory.stages) if len(ranks) > 1 else str(*ranks)
    console.print(f"on the rank that needs most ({which}), with all responses at their largest length", soft_wrap=True)
    console.print()
    console.print(_host_table(memory))
    console.print()


def plain_table(*columns: str, texts: Container[str] = ()) -> Table:
    """Return a table with these columns; the first and those in ``texts`` are left-aligned, all others right-aligned for numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index and column not in texts else "left", no_wrap=True)
    return table


def _stage_table(columns: Mapping[str, Mapping[str, float]], models: Sequence[RunModel]) -> Table:
    table = plain_table("GB of a GPU", *columns)
    for name in (*(f"{model.name}: {state}" for model in models for state in STATES), *COMPONENTS):
        sizes = [parts.get(name, 0.0) for parts in columns.values()]
        if any(sizes):
            table.add_row(name, *map(_gigabytes, sizes))
    table.add_row("all", *(_gigabytes(sum(parts.values())) for parts in columns.values()), style="bold")
    return table


def _host_table(memory: RunMemory) -> Table:
    table = plain_table("GB on the driver's node", "")
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
            tried = "neither recomputation nor 2, 4 or 8 times the ranks are enough"
            yield f"to fit {_size(name)}: {tried}; `megatron-rl plan` tries all layouts"


def _size(name: str) -> str:
    return f"{gpu(name).hbm_bytes / _GIGA:.0f} GB"


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / _GIGA:,.1f}" if num_bytes else "-"


def _text(value: object) -> str:
    text = value.value if isinstance(value, Enum) else value
    return str(text).lower() if isinstance(text, bool) else str(text)
