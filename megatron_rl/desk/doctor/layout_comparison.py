"""``megatron-rl doctor --invariance``: do all layouts compute the same?

Layouts that cannot be are refused with the reason before anything starts. The others run under torchrun, one launch for each
number of ranks, and are compared with the reference layout: loss, gradient norm and weights after one update.
"""

import argparse
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from megatron_rl.config.layout import layout_problems, parse_layout, ranks_needed, ranks_of_replica
from megatron_rl.desk.doctor.layout_tolerances import Tolerances, default_dtype, differing, tolerances_for
from megatron_rl.desk.doctor.rank_launcher import run_ranks
from megatron_rl.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_DEFAULT_LENGTHS = (9, 17, 33, 6, 21, 12, 40, 8, 26, 15)
_TIMEOUT_S = 1800.0
"""Of one launch."""
_MAX_RANKS_PER_CORE = 16
_LAYOUT_WIDTH = len("reference")
_SP_ADDED = "run with sp: this model's experts or latent attention need it with tensor parallelism"


def compare_layouts(arguments: argparse.Namespace) -> int:
    """Of ``doctor``'s arguments; prints the table. The exit status."""
    if not arguments.model or not arguments.layouts:
        raise UserError("doctor --invariance needs --model FOLDER and --layouts, such as tp2,pp2,cp2")
    if arguments.config or arguments.overrides:
        raise UserError("doctor --invariance takes --model and --layouts, and no recipe")
    findings = check_invariance(
        arguments.model,
        arguments.layouts.split(","),
        reference=arguments.reference,
        role=arguments.role,
        max_tokens_per_microbatch=arguments.max_tokens_per_microbatch,
        dtype=arguments.dtype,
        tolerance=arguments.tolerance,
    )
    Console().print(findings_table(findings, arguments.dtype or _own_dtype()))
    for reason in reasons(findings):
        print(reason)
    return 1 if any(finding.is_bad for finding in findings) else 0


_Row = dict[str, Any]
"""One layout's measurement as ``layout_ranks.py`` writes it: layout, loss, grad_norm, difference, moved."""


class DoctorError(UserError):
    """The check itself could not be made."""


@dataclass(frozen=True)
class LayoutResult:
    """One row of the table."""

    layout: str
    num_ranks: int
    loss: float = math.nan
    grad_norm: float = math.nan
    difference: float = math.nan
    verdict: str = ""
    reason: str = ""
    is_bad: bool = False


def check_invariance(
    model: str,
    layouts: Sequence[str],
    *,
    reference: str = "tp1",
    role: str = "policy",
    max_tokens_per_microbatch: int = 64,
    dtype: str | None = None,
    tolerance: float | None = None,
) -> list[LayoutResult]:
    """The reference's row, then one for each of ``layouts`` in their order.

    Where the model's layers cannot be split over tensor-parallel ranks without sequence parallelism, layouts are run
    with it; their rows say so. ``dtype`` and ``tolerance`` None: by device, and what its numbers allow. Raises ConfigError or
    ModelError for a layout that is no layout or a model that is none, DoctorError where the reference cannot run or its
    update is too small to compare.
    """
    from megatron_rl.families.model_facts import has_experts
    from megatron_rl.models.hf.megatron_config import needs_sequence_parallelism
    from megatron_rl.models.hf.model_config import load_hf_config

    hf_config = load_hf_config(model)
    dtype = dtype or _own_dtype()
    bounds = _tolerances(dtype, any(has_experts(hf_config))) if tolerance is None else _given(tolerance)
    asked = list(dict.fromkeys(layouts))
    if needs_sequence_parallelism(hf_config):
        reference, *layouts = dict.fromkeys(map(_with_sequence_parallelism, (reference, *layouts)))
    refusals: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for layout in (reference, *layouts):
        sizes[layout], refusals[layout] = _size_and_refusal(hf_config, layout, dtype)
    if refusals[reference]:
        raise DoctorError(f"the reference layout {reference} cannot run: {refusals[reference]}; choose another one")
    wanted = [layout for layout in dict.fromkeys(layouts) if not refusals[layout] and layout != reference]
    if not wanted and all(refusals[layout] for layout in layouts):
        alone = LayoutResult(reference, sizes[reference], verdict="reference")
        return [alone, *(LayoutResult(name, sizes[name], verdict="refused", reason=refusals[name]) for name in layouts)]
    job = {
        "model": str(model),
        "role": role,
        "lengths": list(_DEFAULT_LENGTHS),
        "max_tokens_per_microbatch": max_tokens_per_microbatch,
        "dtype": dtype,
    }
    measured, failures = _measure(job, reference, {layout: sizes[layout] for layout in (reference, *wanted)})
    base = measured[reference]
    if base["moved"] < bounds.noticeable:
        raise DoctorError(
            f"the update moves no weight by more than {base['moved']:.1e} of its tensor's largest, too little to compare "
            f"at a tolerance of {bounds.weights:.0e}; give a smaller one (--tolerance)"
        )
    rows = [LayoutResult(reference, sizes[reference], base["loss"], base["grad_norm"], 0.0, "reference")]
    for layout in layouts:
        if refusals[layout]:
            rows.append(LayoutResult(layout, sizes[layout], verdict="refused", reason=refusals[layout]))
        elif layout not in measured:
            rows.append(LayoutResult(layout, sizes[layout], verdict="FAILED", reason=failures[layout], is_bad=True))
        else:
            rows.append(_compare(layout, sizes[layout], measured[layout], base, bounds))
    return [row if row.reason else replace(row, reason=_run_otherwise(row, (*asked, reference))) for row in rows]


def _own_dtype() -> str:
    from megatron_rl.models.layers.torch_layers import has_transformer_engine

    return default_dtype(has_engine=has_transformer_engine())


def _tolerances(dtype: str, has_experts: bool) -> Tolerances:
    import torch

    from megatron_rl.models.layers.torch_layers import has_transformer_engine

    return tolerances_for(
        dtype, on_gpu=torch.cuda.is_available(), has_engine=has_transformer_engine(), has_experts=has_experts
    )


def _given(tolerance: float) -> Tolerances:
    return Tolerances(tolerance, tolerance, tolerance, noticeable=10 * tolerance)


def _run_otherwise(row: LayoutResult, asked: Sequence[str]) -> str:
    """How a layout was run in another way than asked for; empty where it was not."""
    parallel, replicas = parse_layout(row.layout)
    actual = row.num_ranks // ranks_of_replica(parallel)
    notes = [] if row.layout in asked else [_SP_ADDED]
    notes += [f"run with dp{actual}, the fewest replicas that fit its experts"] if actual > replicas > 1 else []
    return "; ".join(notes)


def _measure(
    job: dict[str, Any], reference: str, sizes: Mapping[str, int]
) -> tuple[dict[str, _Row], dict[str, str]]:
    """(measurements, why others failed) by layout; one launch for each number of ranks, the reference's first."""
    measured: dict[str, _Row] = {}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="megatron-rl-doctor-") as scratch:
        for num_ranks in sorted(set(sizes.values()), key=lambda size: size != sizes[reference]):
            is_reference = num_ranks == sizes[reference]
            launch = job | {
                "layouts": [layout for layout, size in sizes.items() if size == num_ranks],
                "reference_folder": scratch,
                "out": f"{scratch}/ranks{num_ranks}.json",
                "is_reference": is_reference,
            }
            for row in _run(launch, num_ranks, Path(scratch), failures):
                measured[str(row["layout"])] = row
            if is_reference and reference not in measured:
                raise DoctorError(f"the reference layout {reference} failed: {failures[reference]}")
    return measured, failures


def findings_table(findings: Sequence[LayoutResult], dtype: str = "float32") -> Table:
    table = Table(title=f"one update in each layout, {dtype}", title_justify="left")
    # Numbers stay whole in 80 columns; long names of layouts fold.
    for name in ("layout", "ranks", "loss", "gradient\nnorm", "weights\ndiffer by", "verdict"):
        is_text = name in ("layout", "verdict")
        least = _LAYOUT_WIDTH if name == "layout" else None
        table.add_column(
            name, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text, min_width=least
        )
    for row in findings:
        numbers = (f"{row.loss:.7g}", f"{row.grad_norm:.7g}", f"{row.difference:.1e}")
        values = (row.loss, row.grad_norm, row.difference)
        texts = ["-" if math.isnan(value) else text for text, value in zip(numbers, values, strict=True)]
        table.add_row(row.layout, str(row.num_ranks), *texts, row.verdict)
    return table


def reasons(findings: Sequence[LayoutResult]) -> list[str]:
    """One line for each layout that was refused, failed or was run in another way than asked for."""
    return [f"{row.layout} {row.verdict}: {row.reason}" for row in findings if row.reason]


def _compare(layout: str, num_ranks: int, row: _Row, base: _Row, bounds: Tolerances) -> LayoutResult:
    off = differing(row, base, bounds)
    verdict = f"DIFFERS: {', '.join(off)}" if off else "same"
    return LayoutResult(layout, num_ranks, row["loss"], row["grad_norm"], row["difference"], verdict, is_bad=bool(off))


def _with_sequence_parallelism(layout: str) -> str:
    parallel, _ = parse_layout(layout)
    return f"{layout}+sp" if parallel.tensor_parallel_size > 1 and not parallel.sequence_parallel else layout


def _size_and_refusal(hf_config: "PretrainedConfig", layout: str, dtype: str) -> tuple[int, str]:
    """(ranks of ``layout``, why it cannot run on this model and machine or "")."""
    import torch

    from megatron_rl.errors import ModelError
    from megatron_rl.models.hf.megatron_config import check_layout
    from megatron_rl.models.layers.torch_layers import has_transformer_engine

    parallel, data_parallel_size = parse_layout(layout)
    problems = list(layout_problems(parallel, None))
    if problems:
        return 0, "; ".join(problems)
    num_ranks = ranks_needed(parallel, data_parallel_size)
    try:
        check_layout(hf_config, parallel)
    except ModelError as error:
        return num_ranks, str(error)
    if dtype == "float32" and parallel.context_parallel_size > 1 and has_transformer_engine():
        return num_ranks, "Transformer Engine has no attention for float32 with context parallelism; take --dtype bfloat16"
    if torch.cuda.is_available() and num_ranks > torch.cuda.device_count():
        return num_ranks, f"needs {num_ranks} GPUs, this machine has {torch.cuda.device_count()}"
    cores = os.cpu_count() or 1
    if num_ranks > _MAX_RANKS_PER_CORE * cores:
        return num_ranks, f"needs {num_ranks} ranks, too many for the {cores} cores of this machine"
    return num_ranks, ""


def _run(
    job: dict[str, Any], num_ranks: int, scratch: Path, failures: dict[str, str]
) -> Iterator[_Row]:
    """Measurements of all layouts that run; why the others did not goes into ``failures``.

    A layout that fails ends its launch: those after it get another one.
    """
    waiting, out = list(job["layouts"]), Path(job["out"])
    while waiting:
        out.unlink(missing_ok=True)
        failure = _launch({**job, "layouts": waiting}, num_ranks, scratch)
        done = json.loads(out.read_text()) if out.exists() else []
        yield from done
        waiting = waiting[len(done) :]
        if waiting:
            failures[waiting.pop(0)] = failure or "the ranks ended without a result"
            if job["is_reference"] and not done:
                return
            job = {**job, "is_reference": False}


def _launch(job: dict[str, Any], num_ranks: int, scratch: Path) -> str:
    """Run ``job`` on ``num_ranks`` ranks; why it failed, or ""."""
    job_file = scratch / f"job{num_ranks}.json"
    job_file.write_text(json.dumps(job))
    return run_ranks("megatron_rl.desk.doctor.layout_ranks", job_file, num_ranks, scratch / f"log{num_ranks}", _TIMEOUT_S)
