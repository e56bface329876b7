"""``megatron-rl doctor --invariance``: do all layouts compute the same?

Invalid layouts are refused with the reason before anything starts. All others run under torchrun, one launch per
number of ranks, and are compared with the reference layout: loss, gradient norm and weights after one update.
The tolerance depends on device and dtype, because sums in a different order round differently.
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
from megatron_rl.desk.doctor.rank_checks import run_ranks
from megatron_rl.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DTYPES = ("float32", "bfloat16")
_DEFAULT_LENGTHS = (9, 17, 33, 6, 21, 12, 40, 8, 26, 15)
_TIMEOUT_S = 1800.0
"""Time limit of one launch."""
_MAX_RANKS_PER_CORE = 16
_LAYOUT_WIDTH = len("reference")
_SP_ADDED = "run with sp: this model's experts, latent or linear attention need it with tensor parallelism"


@dataclass(frozen=True)
class Tolerances:
    """Relative tolerances. Each measured figure and its margin are in docs/agreement.md."""

    loss: float
    grad_norm: float
    weights: float
    """Tolerance relative to a tensor's largest element after the update."""
    noticeable: float
    """Smallest weight change of the reference's update: below it the comparison is meaningless."""


_FLOAT32 = Tolerances(1e-5, 1e-5, 1e-5, noticeable=1e-4)
_FLOAT32_LINEAR = Tolerances(1e-5, 3e-5, 1e-4, noticeable=1e-3)
"""Models with linear attention. Gradients that pass the gated delta rule amplify the rounding of what enters it, so the weights of
the convolution and the input projection differ most (2.4e-5 under tp2, the gradient's norm 1.0e-5; norms, A_log and dt_bias 5e-6).
Rounding alone: with the rule in float64, gradients differ from transformers' a thousand times less (tests/odd_exact.py)."""
_FLOAT32_ON_GPU = Tolerances(1e-4, 1e-4, 1e-4, noticeable=1e-3)
"""Products are exact, but kernels depend on shapes."""
_TF32 = Tolerances(5e-4, 5e-3, 0.03, noticeable=0.1)
"""Transformer Engine computes float32 with 11-bit products."""
_BFLOAT16 = Tolerances(2e-3, 0.02, 0.1, noticeable=0.5)
_ROUTED_WEIGHTS = 0.5
"""Tolerance for models with experts: a rounding that reroutes one token changes the gradients of two experts."""


def default_dtype(*, has_engine: bool) -> str:
    """Default dtype of the check. ``has_engine``: layers are Transformer Engine's, which has no float32 attention under
    context parallelism."""
    return "bfloat16" if has_engine else "float32"


def tolerances_for(
    dtype: str, *, on_gpu: bool, has_engine: bool, has_experts: bool, is_linear: bool = False
) -> Tolerances:
    """``is_linear``: the model has linear attention."""
    if dtype == "float32" and not has_engine:
        return _FLOAT32_ON_GPU if on_gpu else _FLOAT32_LINEAR if is_linear else _FLOAT32
    exact = _TF32 if dtype == "float32" else _BFLOAT16
    if not has_experts:
        return exact
    return Tolerances(exact.loss, exact.grad_norm, _ROUTED_WEIGHTS, noticeable=2 * _ROUTED_WEIGHTS)


Measurement = dict[str, Any]
"""One layout's figures, as ``layout_ranks.py`` writes them: layout; loss; grad_norm; difference (the largest difference to the
reference's updated weights, relative to the largest weight of its tensor); of the reference also moved (size of its update, likewise)."""


def differing(row: Mapping[str, Any], base: Mapping[str, Any], bounds: Tolerances) -> list[str]:
    """Names of quantities that differ beyond their tolerance between two measurements of ``layout_ranks.py``."""
    errors = {
        "loss": (abs(row["loss"] - base["loss"]) / abs(base["loss"]), bounds.loss),
        "gradient norm": (abs(row["grad_norm"] - base["grad_norm"]) / base["grad_norm"], bounds.grad_norm),
        "weights": (row["difference"], bounds.weights),
    }
    return [name for name, (error, bound) in errors.items() if not error <= bound]


def compare_layouts(arguments: argparse.Namespace) -> int:
    """Compare the layouts of ``doctor``'s arguments and print the table. Returns the exit status."""
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


@dataclass(frozen=True)
class LayoutResult:
    """Result of one layout: a row of the table."""

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
    """The reference's row, then one row per layout, in the order of ``layouts``.

    If the model's layers need sequence parallelism under tensor parallelism, layouts run with it and their rows
    report it. ``dtype`` None: chosen by the device. ``tolerance`` None: chosen by dtype and device. Raises
    ConfigError or ModelError for an invalid layout or model, UserError if the reference cannot run or its update
    is too small to compare.
    """
    from megatron_rl.families.model_facts import has_experts, has_linear_attention
    from megatron_rl.models.hf.megatron_config import needs_sequence_parallelism
    from megatron_rl.models.hf.model_config import load_hf_config

    hf_config = load_hf_config(model)
    dtype = dtype or _own_dtype()
    bounds = _tolerances(dtype, any(has_experts(hf_config)), has_linear_attention(hf_config), tolerance)
    # Keep the requested names, because sequence parallelism may be added below.
    requested = list(dict.fromkeys(layouts))
    if needs_sequence_parallelism(hf_config):
        reference, *layouts = dict.fromkeys(map(_with_sequence_parallelism, (reference, *layouts)))
    checked = {name: _size_and_refusal(hf_config, name, dtype) for name in (reference, *layouts)}
    sizes = {name: size for name, (size, _) in checked.items()}
    refusals = {name: refusal for name, (_, refusal) in checked.items()}
    if refusals[reference]:
        raise UserError(f"the reference layout {reference} cannot run: {refusals[reference]}; choose another with --reference")
    wanted = [name for name in dict.fromkeys(layouts) if not refusals[name] and name != reference]
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
        raise UserError(
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
    return [row if row.reason else replace(row, reason=_deviations(row, (*requested, reference))) for row in rows]


def _own_dtype() -> str:
    from megatron_rl.models.layers.torch_layers import has_transformer_engine

    return default_dtype(has_engine=has_transformer_engine())


def _tolerances(dtype: str, has_experts: bool, is_linear: bool, given: float | None) -> Tolerances:
    if given is not None:
        return Tolerances(given, given, given, noticeable=10 * given)
    import torch

    from megatron_rl.models.layers.torch_layers import has_transformer_engine

    return tolerances_for(
        dtype,
        on_gpu=torch.cuda.is_available(),
        has_engine=has_transformer_engine(),
        has_experts=has_experts,
        is_linear=is_linear,
    )


def _deviations(row: LayoutResult, requested: Sequence[str]) -> str:
    """Text on how the row's layout differs from the ``requested`` layouts; empty if it ran as requested."""
    parallel, replicas = parse_layout(row.layout)
    actual = row.num_ranks // ranks_of_replica(parallel)
    notes = [] if row.layout in requested else [_SP_ADDED]
    notes += [f"run with dp{actual}, the fewest replicas that fit its experts"] if actual > replicas > 1 else []
    return "; ".join(notes)


def _measure(
    job: dict[str, Any], reference: str, sizes: Mapping[str, int]
) -> tuple[dict[str, Measurement], dict[str, str]]:
    """Returns (measurements, reasons of failures) by layout. One launch per number of ranks, the reference's first."""
    measured: dict[str, Measurement] = {}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="megatron-rl-doctor-") as scratch:
        # The reference's launch comes first, because all others compare with its files.
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
                raise UserError(f"the reference layout {reference} failed: {failures[reference]}")
    return measured, failures


def findings_table(findings: Sequence[LayoutResult], dtype: str = "float32") -> Table:
    table = Table(title=f"one update in each layout, {dtype}", title_justify="left")
    # Figures stay on one line in 80 columns; long layout names wrap.
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
    """Messages about layouts, one line for each that was refused, failed or ran differently than requested."""
    return [f"{row.layout} {row.verdict}: {row.reason}" for row in findings if row.reason]


def _compare(layout: str, num_ranks: int, row: Measurement, base: Measurement, bounds: Tolerances) -> LayoutResult:
    off = differing(row, base, bounds)
    verdict = f"DIFFERS: {', '.join(off)}" if off else "same"
    return LayoutResult(layout, num_ranks, row["loss"], row["grad_norm"], row["difference"], verdict, is_bad=bool(off))


def _with_sequence_parallelism(layout: str) -> str:
    parallel, _ = parse_layout(layout)
    return f"{layout}+sp" if parallel.tensor_parallel_size > 1 and not parallel.sequence_parallel else layout


def _size_and_refusal(hf_config: "PretrainedConfig", layout: str, dtype: str) -> tuple[int, str]:
    """Returns (ranks of ``layout``, reason why it cannot run on this model and node, or "")."""
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
        return num_ranks, f"needs {num_ranks} GPUs, this node has {torch.cuda.device_count()}"
    cores = os.cpu_count() or 1
    if num_ranks > _MAX_RANKS_PER_CORE * cores:
        return num_ranks, f"needs {num_ranks} ranks, too many for the {cores} cores of this node"
    return num_ranks, ""


def _run(
    job: dict[str, Any], num_ranks: int, scratch: Path, failures: dict[str, str]
) -> Iterator[Measurement]:
    """Yields measurements of all layouts that run; adds the reason to ``failures`` for each one that does not.

    A failing layout ends its launch: the layouts after it run in a new launch.
    """
    waiting, out, job_file = list(job["layouts"]), Path(job["out"]), scratch / f"job{num_ranks}.json"
    while waiting:
        out.unlink(missing_ok=True)
        job_file.write_text(json.dumps({**job, "layouts": waiting}))
        failure = run_ranks("megatron_rl.desk.doctor.layout_ranks", job_file, num_ranks, scratch / f"log{num_ranks}", _TIMEOUT_S)
        done = json.loads(out.read_text()) if out.exists() else []
        yield from done
        # Results are written in order, so the first missing layout is the one that failed.
        waiting = waiting[len(done) :]
        if waiting:
            failures[waiting.pop(0)] = failure or "the ranks exited without a result"
            if job["is_reference"] and not done:
                return
            # The reference has been measured, and its files must not be overwritten.
            job = {**job, "is_reference": False}
